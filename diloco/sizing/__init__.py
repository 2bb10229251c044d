# SPDX-License-Identifier: Apache-2.0
"""Estimates a learner's need of chips, hosts and links, without a chip.

`python -m diloco.plan --config=… --topology=…`; start with `estimate`.

  planner         a run by arithmetic; free of jax
  plan_text       the same as text; free of jax
  slices          devices of a slice that is not here
  chip_memory     memory of compiled programs, and between them
  host_memory     memory of hosts, as formulas; free of jax
  syncer_machine  CPUs, memory and disk of the syncer; free of jax
  estimate        one learner on one slice
  estimate_text   the same as text
  dry_runs        compiles and stops: `python -m diloco.learner --dry_run`
"""
