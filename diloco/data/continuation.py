# SPDX-License-Identifier: Apache-2.0
"""Makes multiple-choice questions from a text: which continuation is true?

The true continuation stands among bytes from elsewhere in the same text, all of
the same length. A text is cut at any byte, often within a word: what follows
the beginning of a line is too hard for models of a laptop's size, which then
would all score like guessing.
"""

from collections.abc import Iterator

import numpy as np

from diloco.data.grammar import draws
from diloco.data.questions import Question

# Random streams; the two of `grammar` are 0 and 1.
_PLACES, _OTHERS, _ANSWERS = 16, 17, 18
_DRAWS_PER_CHOICE_MAX = 64  # Beyond it the text repeats itself too much.


def continuation_questions(
  text: np.ndarray,
  count: int,
  choices: int = 4,
  context_bytes: int = 112,
  choice_bytes: int = 16,
  seed: int = 0,
) -> list[Question]:
  """Returns questions whose places in the text do not overlap.

  Only printable ASCII is asked about, and no choice is mostly blank.

  Args:
    text: uint8 [bytes], such as a corpus' held-out part.
    count: number of questions.
    choices: choices per question, including the right one.
    context_bytes: bytes that are shown.
    choice_bytes: bytes of each choice.
    seed: seed of places, wrong choices and the right one's index.

  Raises:
    ValueError: a number is out of its range, or the text has too few places.
  """
  least = {'count': 1, 'choices': 2, 'context_bytes': 1, 'choice_bytes': 1}
  given = (count, choices, context_bytes, choice_bytes)
  for (name, bound), value in zip(least.items(), given):
    if value < bound:
      raise ValueError(f'{name}={value}: must be at least {bound}')
  places = _places(text, context_bytes, choice_bytes)
  asked = _apart(places, context_bytes + choice_bytes, count, seed)
  answers = draws(seed, _ANSWERS, count) % np.uint64(choices)
  others = _others(text, places, count * choices, choice_bytes, seed)
  questions = []
  for place, answer in zip(asked, answers.tolist()):
    truth = _text(text, place, choice_bytes)
    wrong = {}  # In the order in which they were drawn.
    while len(wrong) < choices - 1:
      other = next(others)
      if other != truth:
        wrong[other] = None
    shown = [*wrong]
    shown.insert(answer, truth)
    context = _text(text, place - context_bytes, context_bytes)
    questions.append(Question(context, tuple(shown), answer))
  return questions


def _places(
  text: np.ndarray, context_bytes: int, choice_bytes: int
) -> np.ndarray:
  """Returns the offsets whose surrounding bytes are suitable for a question."""
  plain = (text == ord('\n')) | ((text >= ord(' ')) & (text <= ord('~')))
  foreign = np.concatenate([[0], np.cumsum(~plain)])
  inked = np.concatenate([[0], np.cumsum((text > ord(' ')) & plain)])
  starts = np.arange(context_bytes, len(text) - choice_bytes + 1)
  ends = starts + choice_bytes
  clean = foreign[ends] == foreign[starts - context_bytes]
  return starts[clean & (2 * (inked[ends] - inked[starts]) >= choice_bytes)]


def _apart(
  places: np.ndarray, distance: int, count: int, seed: int
) -> list[int]:
  """Returns `count` places in random order, at least `distance` apart."""
  order = np.argsort(draws(seed, _PLACES, len(places)), kind='stable')
  taken: list[int] = []
  for place in places[order].tolist():
    if all(abs(place - other) >= distance for other in taken):
      taken.append(place)
    if len(taken) == count:
      return taken
  raise ValueError(
    f'the text has {len(taken)} places to ask about, {count} were wanted'
  )


def _others(
  text: np.ndarray,
  places: np.ndarray,
  wanted: int,
  choice_bytes: int,
  seed: int,
) -> Iterator[str]:
  drawn = draws(seed, _OTHERS, wanted * _DRAWS_PER_CHOICE_MAX)
  for i in (drawn % np.uint64(len(places))).tolist():
    yield _text(text, int(places[i]), choice_bytes)
  raise ValueError(
    f'of {len(places)} places in the text too few go on differently'
  )


def _text(text: np.ndarray, start: int, size: int) -> str:
  return text[start : start + size].tobytes().decode('ascii')
