# SPDX-License-Identifier: Apache-2.0
"""Multiple-choice questions: read, written, and made from a text.

  {"context": "…", "choices": ["…", "…"], "answer": 1}

`answer` counts from 0. A model answers with the choice that it finds likeliest
as a continuation of the context.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from diloco.data.corpus import draws

FIELDS = ('context', 'choices', 'answer')
# Random streams; the two of `grammar` are 0 and 1.
_PLACES, _OTHERS, _ANSWERS = 16, 17, 18
_DRAWS_PER_CHOICE_MAX = 64  # Beyond it the text repeats itself too much.


@dataclasses.dataclass(frozen=True)
class Question:
  """A context, possible continuations, and the index of the right one."""

  context: str
  choices: tuple[str, ...]
  answer: int


def read_questions(
  path: pathlib.Path, vocab: int, choice_bytes_max: int
) -> list[Question]:
  """Returns the questions of a task file, checked for a model of bytes.

  Args:
    vocab: larger byte values are unknown to the model.
    choice_bytes_max: a longer choice does not fit after any context.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line is not a question that the model can be asked; gives the
      number of the first one.
  """
  if not path.is_file():
    raise FileNotFoundError(f'no task file at {path}')
  questions = []
  for number, line in enumerate(path.read_bytes().splitlines(), start=1):
    try:
      question = _question(line)
      for problem in _problems(question, vocab, choice_bytes_max):
        raise ValueError(problem)
    except ValueError as error:  # Includes broken JSON and broken UTF-8.
      raise ValueError(f'{path}, line {number}: {error}') from None
    questions.append(question)
  if not questions:
    raise ValueError(f'{path}: has no question')
  return questions


def write_questions(path: pathlib.Path, questions: Sequence[Question]) -> None:
  """Writes one line for each; ASCII, so that no editor changes a byte."""
  lines = [json.dumps(dataclasses.asdict(question)) for question in questions]
  path.write_text(''.join(line + '\n' for line in lines))


def _question(line: bytes) -> Question:
  if not line.strip():
    raise ValueError('is empty')
  value = json.loads(line.decode())
  if not isinstance(value, dict):
    raise ValueError(f'is a {type(value).__name__}, must be an object')
  if odd := sorted(value.keys() ^ set(FIELDS)):
    raise ValueError(f'missing or unknown fields {", ".join(odd)}')
  context, choices, answer = (value[name] for name in FIELDS)
  if not isinstance(context, str):
    raise ValueError(f'context={context!r}: must be a string')
  texts = isinstance(choices, list) and all(isinstance(c, str) for c in choices)
  if not texts:
    raise ValueError(f'choices={choices!r}: must be a list of strings')
  if type(answer) is not int:  # True is an int, but not an answer.
    raise ValueError(f'answer={answer!r}: must be an integer')
  return Question(context, tuple(choices), answer)


def _problems(
  question: Question, vocab: int, choice_bytes_max: int
) -> Iterator[str]:
  choices = question.choices
  if len(choices) < 2:
    yield f'choices: are {len(choices)}, must be at least 2'
  if len(set(choices)) < len(choices):
    yield 'choices: two are the same'
  if not 0 <= question.answer < len(choices):
    yield f'answer={question.answer}: must be in 0 … {len(choices) - 1}'
  if not question.context:
    yield 'context: is empty, the first byte of a choice follows nothing'
  for i, choice in enumerate(choices):
    size = len(choice.encode())
    if not 1 <= size <= choice_bytes_max:
      yield (
        f'choices[{i}]: has {size} bytes, must be 1 … {choice_bytes_max}, '
        'the length of the sequences that the model was trained on'
      )
  for name, text in [('context', question.context), *_named(choices)]:
    if foreign := sorted({b for b in text.encode() if b >= vocab}):
      names = ', '.join(f'0x{byte:02x}' for byte in foreign)
      yield f'{name}: has the bytes {names}, the vocabulary is {vocab}'


def _named(choices: Sequence[str]) -> Iterator[tuple[str, str]]:
  return ((f'choices[{i}]', choice) for i, choice in enumerate(choices))


# Makes multiple-choice questions from a text: which continuation is true?
#
# The true continuation stands among bytes from elsewhere in the same text, all
# of the same length. A text is cut at any byte, often within a word: what
# follows the beginning of a line is too hard for models of a laptop's size,
# which then would all score like guessing.


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
    choices: choices per question, including the right one.

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
