# SPDX-License-Identifier: Apache-2.0
"""Sweeps: variants of one configuration over several seeds, compared.

The lab makes their runs in simulated time (`python -m diloco.lab --sweep`), the
launcher as processes (`python -m launch.local --sweep`); both leave the same
files. Nothing here imports jax.

  sweep            variants, results, differences and their intervals
  making           --sweep, --seeds, --only; configurations, missing runs, table
  code             a fingerprint of what results depend on
  recorded_result  the result of a run of processes, from its folder
"""
