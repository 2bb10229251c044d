# SPDX-License-Identifier: Apache-2.0
"""Sweeps of real runs: `python -m launch.local --sweep`; imports no jax.

real_runs   checks each run, and makes it as `launch.local` makes one
real_sweep  plans the runs, makes one after the other, shows the table
"""
