# SPDX-License-Identifier: Apache-2.0
"""Scores a model on multiple-choice questions: its answer is the likeliest.

Suffixes of arrays give their shape:
  B rows scored at once, L window, V vocab.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.data.tasks import Question
from diloco.metrics import status
from diloco.models import api


def log_likelihoods(
  model: api.Model,
  params: Mapping[str, np.ndarray],
  questions: Sequence[Question],
  window: int,
  rows: int,
  each: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[list[float]]:
  """Returns Σ log p(byte | all before it) over each choice's bytes, in nats.

  A context that does not fit into the window with its choice loses its
  beginning.

  Args:
    questions: every choice has at most `window` bytes.
    window: L, the number of bytes that the model sees.
    rows: B, choices scored at once.
    each: yields the numbers that it is given, such as to say how far it is.

  Returns:
    For each question, the sum of each choice.
  """

  @jax.jit
  def score(params, tokens_BL, targets_BL, is_choice_BL):
    logits_BLV = model.logits(api.unflatten(params), tokens_BL)
    chances_BLV = jax.nn.log_softmax(logits_BLV.astype(jnp.float32), axis=-1)
    picked_BL1 = jnp.take_along_axis(
      chances_BLV, targets_BL[..., None], axis=-1
    )
    return jnp.sum(jnp.where(is_choice_BL, picked_BL1[..., 0], 0.0), axis=-1)

  placed = {path: jnp.asarray(x) for path, x in params.items()}
  encoded = [
    _row(question.context.encode(), choice.encode(), window)
    for question in questions
    for choice in question.choices
  ]
  summed: list[float] = []
  for first in each(range(0, len(encoded), rows)):
    batch = encoded[first : first + rows]
    # The last batch is padded with its own first row: one compiled shape.
    filled = batch + batch[:1] * (rows - len(batch))
    scored = score(placed, *(np.stack(part) for part in zip(*filled)))
    summed += np.asarray(scored)[: len(batch)].tolist()
  answered = iter(summed)
  return [[next(answered) for _ in q.choices] for q in questions]


def task_score(
  file: str,
  questions: Sequence[Question],
  likelihoods: Sequence[Sequence[float]],
  window: int,
) -> status.TaskScore:
  """Counts the right answers; a tie for the likeliest choice is not right."""
  right_by_sum = right_by_byte = cut = 0
  for question, sums in zip(questions, likelihoods):
    sizes = [len(choice.encode()) for choice in question.choices]
    per_byte = [total / size for total, size in zip(sums, sizes)]
    right_by_sum += _is_right(sums, question.answer)
    right_by_byte += _is_right(per_byte, question.answer)
    cut += len(question.context.encode()) + max(sizes) > window + 1
  count = len(questions)
  return status.TaskScore(
    file=file,
    questions=count,
    chance=float(np.mean([1 / len(q.choices) for q in questions])),
    cut=cut,
    by_sum=status.share(right_by_sum, count),
    by_byte=status.share(right_by_byte, count),
  )


def _row(
  context: bytes, choice: bytes, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns tokens, next tokens, and the mask of the choice's; all [L]."""
  if not (context and 0 < len(choice) <= window):
    raise ValueError(
      f'a choice of {len(choice)} bytes after {len(context)} of context, the '
      f'window has {window}'
    )
  text = np.frombuffer(context + choice, np.uint8)[-(window + 1) :]
  padded = np.zeros(window + 1, np.int32)
  padded[: len(text)] = text
  positions = np.arange(1, window + 1)
  is_choice = (positions >= len(text) - len(choice)) & (positions < len(text))
  return padded[:-1], padded[1:], is_choice


def _is_right(values: Sequence[float], answer: int) -> bool:
  others = [value for i, value in enumerate(values) if i != answer]
  return values[answer] > max(others)
