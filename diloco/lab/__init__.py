# SPDX-License-Identifier: Apache-2.0
"""Many learners with real gradients in one process, simulated clock.

`python -m diloco.lab`, or `diloco.lab(config)` in Python: the package is
callable. Start with `run`, then `decoupled`.

  run            one run of the configured system
  decoupled      Decoupled DiLoCo: the simulator around real arrays
  data_parallel  data-parallel, elastic, alone
  process_arrays  what its processes hold
  failure_schedule  visits, deaths and planned kills of learners
  outputs        what a run writes and shows
  checkpoints    what a run that was cut resumes from
  sweep_runner   makes the runs of a sweep; `diloco.sweeps` has the rest
"""

from diloco import callables

callables.make_callable(__name__)
