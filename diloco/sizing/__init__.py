# SPDX-License-Identifier: Apache-2.0
"""What a learner takes of chips, hosts and links, before it has a chip.

`python -m diloco.plan --config=… --topology=…`; start with `estimate`.

  slices         devices of a slice that is not here
  chip_memory    memory of compiled programs, and between them
  host_memory    memory of hosts, as formulas; free of jax
  estimate       one learner on one slice
  estimate_text  the same as text
  dry_runs       compiles and stops: `python -m diloco.learner --dry_run`
"""
