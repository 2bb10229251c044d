# SPDX-License-Identifier: Apache-2.0
"""Training data: corpora, tokenizers, and rows by number.

Start with `pipeline`: element i of a learner's dataset is row i of its shard.

  pipeline        shuffling, rows dealt to learners, read ahead, by Grain
  text_windows    windows of tokens, held-out batches; free of Grain
  sources         sources and formats by name; read by the configuration
  corpus          text in memory; documents in files of any size, or a mix
  documents       documents by number, their index, tokens as one row
  array_records, …  readers of files, one of each of `sources.FORMATS`
  records_folder  ArrayRecord: written; free of jax
  tokenizers      what a tokenizer is, and those that can be configured
  tasks           multiple-choice questions
  paths           files by path, pattern or URL; text files
"""
