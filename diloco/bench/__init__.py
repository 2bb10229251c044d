# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the whole system: `python -m diloco.bench --all`.

Start with `rows`, the benchmarks by name; `docs/benchmarks.md` is their page.

  rows           all benchmarks; a new one is an entry
  measurement    what a benchmark returns
  comparison     repetitions as a table, as JSON, as a line of the history
  machine_load   the machine, and how busy others keep it
  real_run       runs of real processes, and their configuration
  sync_stalls    steps and bytes with and without syncing
  fault_gaps     what others notice of a kill -9, and how soon it is back
  long_run       memory and times over an hour: a main of its own
  syncer_load    memory of a syncer, and what M learners cost it
  checkpoint_stalls  what a learner's checkpoint costs its steps
  syncer_rounds  a round of the syncer, its parts, its shards; codecs
  simulated_steps  learner-steps of the simulator by M, and of the lab
  start_times    start of the processes beside `import jax`
"""
