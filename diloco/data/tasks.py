# SPDX-License-Identifier: Apache-2.0
"""Questions, read from a file: one on each line.

  {"context": "…", "choices": ["…", "…"], "answer": 1}

`answer` counts from 0. A model answers with the choice that it finds likeliest
as a continuation of the context. Dialogues, as they are trained on, are
questions without choices; their last answer is what is asked for:

  {"messages": [{"role": "user", "content": "…"},
                {"role": "assistant", "content": "…"}]}
  {"prompt": "…", "completion": "…"}
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator

from diloco.data.dialogues import Dialogue, document_of_line

FIELDS = ('context', 'choices', 'answer')


@dataclasses.dataclass(frozen=True)
class Question:
  """A context, possible continuations, and the index of the right one."""

  context: str
  choices: tuple[str, ...]
  answer: int


# Begins of lines' first fields, and the `data.text_key` that reads them.
DIALOGUES = {'messages': 'chat:messages', 'prompt': 'prompt+completion'}


def read_dialogues(path: pathlib.Path) -> list[Dialogue] | None:
  """Returns the dialogues of a task file; None if it has none.

  The first line decides.

  Raises:
    ValueError: another line is no such dialogue; gives its number.
  """
  if not path.is_file():
    return None
  lines = path.read_bytes().splitlines()
  try:
    fields = json.loads(lines[0])
    text_key = next(DIALOGUES[key] for key in DIALOGUES if key in fields)
  except (ValueError, IndexError, TypeError, StopIteration):
    return None
  dialogues = []
  for number, line in enumerate(lines, start=1):
    try:
      dialogues.append(document_of_line(line, text_key))
    except ValueError as error:
      raise ValueError(f'{path}, line {number}: {error}') from None
  return dialogues


def read_questions(path: pathlib.Path) -> list[Question]:
  """Returns the questions of a task file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line is not a question that a model can be asked; gives the
      number of the first one.
  """
  if not path.is_file():
    raise FileNotFoundError(f'no task file at {path}')
  questions = []
  for number, line in enumerate(path.read_bytes().splitlines(), start=1):
    try:
      question = _question(line)
      for problem in _problems(question):
        raise ValueError(problem)
    except ValueError as error:  # Includes broken JSON and broken UTF-8.
      raise ValueError(f'{path}, line {number}: {error}') from None
    questions.append(question)
  if not questions:
    raise ValueError(f'{path}: has no question')
  return questions


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


def _problems(question: Question) -> Iterator[str]:
  choices = question.choices
  if len(choices) < 2:
    yield f'choices: are {len(choices)}, must be at least 2'
  if len(set(choices)) < len(choices):
    yield 'choices: two are the same'
  if not 0 <= question.answer < len(choices):
    yield f'answer={question.answer}: must be in 0 … {len(choices) - 1}'
  if not question.context:
    yield 'context: is empty, the beginning of a choice follows nothing'
  for i, choice in enumerate(choices):
    if not choice:
      yield f'choices[{i}]: is empty'
