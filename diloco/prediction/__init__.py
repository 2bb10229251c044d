# SPDX-License-Identifier: Apache-2.0
"""One model of a run of real processes: its faults, under a simulated clock.

`python -m diloco.simulate --replay=DIR` predicts a run from its kills, and
`launch.chaos` compares a run with the same plan of faults; start with `twin`.

  recorded  what is read and measured of a run
  twin      the machines under the faults and the speeds of that run
  report    measured and predicted, side by side
"""
