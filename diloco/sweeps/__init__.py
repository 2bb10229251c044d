# SPDX-License-Identifier: Apache-2.0
"""Sweeps: variants of one configuration over several seeds, compared.

The lab makes their runs in simulated time (`python -m diloco.lab --sweep`), the
launcher as processes (`python -m launch.local --sweep`); both leave the same
files. Nothing here imports jax.

  sweep            variants, results, differences and their intervals
  sweep_flags      --sweep, --seeds and --only, and the variants they ask for
  variant_configs  the configuration of each variant; checks of finished runs
  making           the runs that are missing, how they end, the table
  recorded_result  the result of a run of processes, from its folder
"""
