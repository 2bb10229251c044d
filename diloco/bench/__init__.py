# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the whole system: `python -m diloco.bench --all`.

Start with `rows`, the benchmarks by name; `docs/benchmarks.md` is their page.

  rows           all benchmarks; those without processes; a new one is an entry
  process_rows   stalls, bytes, memory and growth of real processes
  real_run       runs of real processes, and their configuration
  measurement    what a benchmark returns; a table of it; the machine
"""
