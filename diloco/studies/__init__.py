# SPDX-License-Identifier: Apache-2.0
"""Questions to the simulator: a configuration in, a report out.

`python -m diloco.simulate` runs the study that a configuration names:
`goodput`, `bandwidth`, `heterogeneous`, `scavenging` or `offer_age`, each a
module with a function `report`. `python -m diloco.plan` prints `planning`.

  goodput_cells, goodput_tables   the goodput study's runs and tables
  inputs     fleet and network of a configuration, the paper's figures
  traces     what befalls a fleet in one seed
  lanes      what a fleet did, as a timeline
  planning   what to expect of a run, by arithmetic
  slice_share  learners on TPU slices: a step's time, a chip's memory
  plan_text  the same as text

Nothing here imports jax.
"""
