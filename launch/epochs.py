# SPDX-License-Identifier: Apache-2.0
"""Epochs: how often a run reads its text, the steps that suit, over-fitting."""

from diloco.config.data_section import text_bytes
from diloco.config.run_config import RunConfig
from diloco.config.unlike import tokens_per_step
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
  if sizes is None:
    return protocol.total_steps
  fitting = EPOCHS_MAX * sizes[0] // tokens_per_step(config)
  least = min(protocol.sync_every_steps, protocol.total_steps)
  return min(max(fitting, least), protocol.total_steps)


def line(config: RunConfig) -> str | None:
  """Returns how often a run will read its text; None where it is not known."""
  sizes = text_bytes(config.data)
  if sizes is None:
    return None
  trained, steps = sizes[0], config.protocol.total_steps
  epochs = steps * tokens_per_step(config) / trained
  text = f'{steps} steps read the {trained:,} bytes of text {epochs:.1f} times'
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
