# SPDX-License-Identifier: Apache-2.0
"""Hands out what is known of runs: `diloco report RUN…`, `diloco wandb RUN`.

What is on the page is decided by `diloco.watch`.

  __main__  a page of runs and sweeps, with its tables as CSV
  to_wandb  hands a run to Weights & Biases
"""
