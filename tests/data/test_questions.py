# SPDX-License-Identifier: Apache-2.0
"""Task files: the shipped one is sound, wrong lines are named."""

import json
import pathlib

import pytest

from diloco.data.tasks import read_questions

SHIPPED = pathlib.Path(__file__).parents[2] / 'experiments' / 'tasks'
GOOD = {'context': 'ab', 'choices': ['c', 'de'], 'answer': 1}


def test_the_shipped_task_is_even():
  questions = read_questions(SHIPPED / 'continuation.jsonl')
  assert len(questions) == 256
  for question in questions:
    assert [len(c) for c in question.choices] == [16] * 4
    assert len(question.context) == 112
  # No index is right so often that always naming it would look like skill.
  answers = [question.answer for question in questions]
  assert max(map(answers.count, range(4))) <= 256 * 0.32


@pytest.mark.parametrize(
  ('line', 'problem'),
  [
    ('', 'is empty'),
    ('{"context":', 'Expecting value'),
    ('[1]', 'is a list, must be an object'),
    ({'answer': None}, 'answer=None: must be an integer'),
    ({'answer': True}, 'answer=True: must be an integer'),
    ({'answer': 2}, r'answer=2: must be in 0 … 1'),
    ({'answer': -1}, r'answer=-1: must be in 0 … 1'),
    ({'context': 3}, 'context=3: must be a string'),
    ({'context': ''}, 'context: is empty'),
    ({'choices': 'cd'}, "choices='cd': must be a list of strings"),
    ({'choices': ['c', 1]}, 'must be a list of strings'),
    ({'choices': ['c'], 'answer': 0}, 'choices: are 1, must be at least 2'),
    ({'choices': ['c', 'c']}, 'choices: two are the same'),
    ({'choices': ['c', '']}, r'choices\[1\]: is empty'),
    ({'id': 7}, 'missing or unknown fields id'),
  ],
)
def test_a_wrong_line_is_named(tmp_path, line, problem):
  path = tmp_path / 'task.jsonl'
  if isinstance(line, dict):
    line = json.dumps(GOOD | line)
  path.write_text(json.dumps(GOOD) + '\n' + line + '\n')
  with pytest.raises(ValueError, match=rf'task\.jsonl, line 2: .*{problem}'):
    read_questions(path)


def test_a_line_that_is_no_utf8_is_named(tmp_path):
  path = tmp_path / 'task.jsonl'
  path.write_bytes(b'{"context": "\xff"}\n')
  with pytest.raises(ValueError, match=r'line 1: .*utf-8'):
    read_questions(path)


def test_a_file_without_a_question_is_refused(tmp_path):
  (tmp_path / 'task.jsonl').touch()
  with pytest.raises(ValueError, match='has no question'):
    read_questions(tmp_path / 'task.jsonl')


def test_an_absent_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='no task file at'):
    read_questions(tmp_path / 'task.jsonl')
