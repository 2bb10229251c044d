# SPDX-License-Identifier: Apache-2.0
<<<<<<< HEAD
"""Hands out what is known of runs: `diloco report RUN…`, `diloco wandb RUN`.
=======
"""Pages of what was trained: `python -m diloco.report DIR`.
>>>>>>> main

  __main__  a page of runs and sweeps, with its tables as CSV
  to_wandb  hands a run to Weights & Biases
"""
