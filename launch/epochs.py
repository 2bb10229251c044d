# SPDX-License-Identifier: Apache-2.0
"""Epochs: how often a run reads its text, the steps that suit, over-fitting."""

import functools
import sys

from diloco.config.data_section import DataConfig, text_bytes
from diloco.config.run_config import RunConfig
from diloco.config.unlike import tokens_per_step
from diloco.data import corpus, text_windows
from diloco.data.tokenizers import make_tokenizer
from diloco.metrics import jsonl, names
from diloco.metrics.workdir import EVALUATOR, Workdir

# Times that `diloco train` reads a text at most. The model of
# experiments/train.py on 35 kB of prose, one run each: its held-out loss was
# least after 9.8 epochs (2.398 nats per byte), and 5.265 after 24; a run of 9.8
# epochs in all ended at 2.479, one of 6.1 at 2.581.
EPOCHS_MAX = 10
RISE = 0.01  # Of the least held-out loss; less is the noise of its batches.


def steps_for(config: RunConfig) -> int:
  """Returns the steps of a run that reads its text `EPOCHS_MAX` times at most.

  They are those of the configuration, or fewer; one cycle of H at least.
  """
  protocol, sizes = config.protocol, text_bytes(config.data)
  if sizes is not None:
    trained = sizes[0]
  elif config.data.items:
    _, trained = corpus.size_of(_documents(config.data).train)
  else:
    return protocol.total_steps
  fitting = EPOCHS_MAX * trained // tokens_per_step(config)
  least = min(protocol.sync_every_steps, protocol.total_steps)
  return min(max(fitting, least), protocol.total_steps)


def line(config: RunConfig) -> str | None:
  """Returns how often a run will read its text; None where it is not known."""
  sizes = text_bytes(config.data)
  if sizes is None:
    return None
  return _times(config, sizes[0], 'bytes of text')


def documents_line(config: RunConfig) -> str | None:
  """Returns that of files of documents, which are indexed now; None: of none.

  Raises:
    FileNotFoundError, ValueError: of data or tokenizer, or they are too short;
      says what is needed.
  """
  data, evaluated = config.data, config.run
  if not data.items:
    return None
  text = _documents(data)
  text_windows.check_windows(text.train, data.seq_len, data.batch, data.shards)
  text_windows.heldout_shape(
    text.heldout, data.seq_len, evaluated.eval_batch, evaluated.eval_batches
  )
  documents, tokens = corpus.size_of(text.train)
  return f'{documents:,} documents: {_times(config, tokens, "tokens")}'


@functools.cache
def _documents(data: DataConfig) -> corpus.Corpus:
  tokenizer = make_tokenizer(data.tokenizer, data.end_token)
  return corpus.section_corpus(
    data, tokenizer, lambda line: print(line, file=sys.stderr)
  )


def _times(config: RunConfig, trained: int, unit: str) -> str:
  """Returns how often the steps of a run read what it is trained on."""
  steps = config.protocol.total_steps
  epochs = steps * tokens_per_step(config) / max(trained, 1)
  text = f'{steps} steps read the {trained:,} {unit} {epochs:.1f} times'
  if epochs > EPOCHS_MAX:
    text += (
      f'; more than {EPOCHS_MAX} make a small model worse on new text: give '
      'more text, or fewer steps'
    )
  return text


def over_fitted(workdir: Workdir) -> str | None:
  """Returns what is to be said of a held-out loss that rose; None: nothing.

  It compares what the evaluator has measured, always on the same text.
  """
  curve = [
    (record[names.EVAL_LOSS], int(record['step']))
    for record in jsonl.from_the_end(workdir.metrics(EVALUATOR))
    if names.EVAL_LOSS in record
  ]
  if not curve:
    return None
  (last, _), (least, step) = curve[0], min(curve)
  if last <= least * (1 + RISE):
    return None
  return (
    f'the loss on held-out text rose from its minimum {least:.3f} at step '
    f'{step} to {last:.3f}: over-fitted. More text, or about {step} steps, '
    'give a better model'
  )
