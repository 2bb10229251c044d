# SPDX-License-Identifier: Apache-2.0
"""Scores of a task: the share of right answers, with its uncertainty."""

import dataclasses
import math

NORMAL_95 = 1.959964  # 95 % of a normal distribution lie within so many σ.


@dataclasses.dataclass(frozen=True)
class Share:
  """Right answers as a share of all, with its 95 % interval."""

  right: int
  share: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class TaskScore:
  """A model's answers to the questions of one task file.

  Attributes:
    file: name of the file.
    questions: number of questions.
    chance: the share that guessing would answer rightly.
    cut: questions whose context was too long, and lost its beginning.
    by_sum: score if the answer is the choice of highest log-likelihood.
    by_byte: score if it is divided by the choice's length in bytes.
  """

  file: str
  questions: int
  chance: float
  cut: int
  by_sum: Share
  by_byte: Share


def share(right: int, questions: int) -> Share:
  """Returns the share and its interval by Wilson's formula.

  (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n): unlike p ± z √(p(1−p)/n)
  it is not empty if all answers are right, or none.

  Raises:
    ValueError: there are no questions, or more right answers than questions.
  """
  if not 0 <= right <= questions or not questions:
    raise ValueError(f'{right=} of {questions=}')
  p, z, n = right / questions, NORMAL_95, questions
  middle = p + z * z / (2 * n)
  spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  whole = 1 + z * z / n
  low, high = (middle - spread) / whole, (middle + spread) / whole
  # Rounding must not exclude a share of 0 or 1 from the interval.
  return Share(right, p, max(0.0, min(low, p)), min(1.0, max(high, p)))
