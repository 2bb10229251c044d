# SPDX-License-Identifier: Apache-2.0
"""A recorded run, predicted from its kills by the simulator.

`python -m diloco.simulate --replay=DIR`; start with `report`.

  history     a run that can be replayed: lives, steps, closed rounds
  prediction  measures speeds and start-ups, and simulates
  run_lives   pictures of both
  report      both side by side
"""
