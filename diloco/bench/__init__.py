# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the whole system: `python -m diloco.bench --all`.

Start with `rows`, the benchmarks by name; `docs/benchmarks.md` is their page.

  rows         all benchmarks; a new one is an entry
  real_run     runs of real processes, and their configuration
  measurement  what a benchmark returns; a table of it; the machine
"""
