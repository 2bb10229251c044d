# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a trained model: losses, questions, text.

The commands are `python -m diloco.evaluate`, `evaluator`, `generate`, `export`.

  final_evaluation  the final Θ of a run, checked and evaluated; its answers
  sampling          text drawn from a model
  export_files      config, tokenizer and task beside an exported model
"""
