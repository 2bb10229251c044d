# SPDX-License-Identifier: Apache-2.0
"""Pages of what was trained: `python -m diloco.report DIR`.

Start with `folders`: what a folder is, a run or a sweep, and their page.

  __main__       flags to a page
  folders        the page of several folders
  run_report     the parts of a page of runs
  run_tables     tables of runs
  run_charts     charts of runs
  sweep_reader   reads the results of a sweep
  sweep_report   the parts of a page of a sweep
  to_wandb       hands a run to Weights & Biases
"""
