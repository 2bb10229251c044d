# SPDX-License-Identifier: Apache-2.0
"""Outputs of a run, and statistics computed from them; free of jax.

Start with `workdir`: where everything lies in the folder of a run.

  workdir       paths
  files         JSON files that are never seen half written
  jsonl         JSON lines that grow for weeks
  figures       the one table of what is shown of a run, everywhere
  names         names of scalars
  writer        scalars as JSONL and for TensorBoard
  status        `status.json`, `summary.json`, `evaluation.json`
  run_progress  time left; how far a command is
  goodput       goodput and uptime
  ages          how old what was merged was
  token_ledger  trained = merged + overwritten + lost + pending
  recorded_run  reads the folder of a run, whatever became of it
"""
