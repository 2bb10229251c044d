# SPDX-License-Identifier: Apache-2.0
"""Sweeps of real runs: `python -m launch.local --sweep`; imports no jax.

`real_runs` checks each run, and makes one after the other as `launch.local`
makes one; `diloco.sweeps` has all else.
"""
