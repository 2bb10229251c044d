# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the whole system: `python -m diloco.bench --all`.

Start with `rows`, the benchmarks by name; `docs/benchmarks.md` is their page.

  rows           all benchmarks; a new one is an entry
  measurement    what a benchmark returns; repetitions as table, JSON, a line
  machine_load   the machine, and how busy others keep it
  real_run       runs of real processes, and their configuration
  process_rows   stalls, bytes, kills, memory and starts of real processes
  crowd          what M learners cost a syncer
  checkpoint_stalls  what a learner's checkpoint costs its steps
  syncer_rounds  a round of the syncer, its parts, its shards; hosts; codecs
  simulated_steps  learner-steps of the simulator by M, and of the lab
  long_run       memory and times over an hour: a main of its own
"""
