# SPDX-License-Identifier: Apache-2.0
"""Questions made from a text: right by construction, the same each time."""

import numpy as np
import pytest

from diloco.data.tasks import Question, continuation_questions

LINES = [
  f'line {i:03d} holds {i * i:06d} and {i * 7:05d}\n' for i in range(300)
]
TEXT = np.frombuffer(''.join(LINES).encode(), np.uint8)
WHOLE = ''.join(LINES)
SIZES = {'choices': 4, 'context_bytes': 40, 'choice_bytes': 16}


def test_the_answer_is_how_the_text_goes_on():
  questions = continuation_questions(TEXT, 50, seed=3, **SIZES)
  assert len(questions) == 50
  for question in questions:
    place = WHOLE.index(question.context) + 40
    truth = WHOLE[place : place + 16]
    assert question.choices[question.answer] == truth


def test_every_choice_is_of_the_text_and_none_is_twice_there():
  for question in continuation_questions(TEXT, 50, seed=3, **SIZES):
    assert len(set(question.choices)) == 4
    for choice in question.choices:
      assert len(choice) == 16 and choice in WHOLE


def test_places_do_not_overlap():
  questions = continuation_questions(TEXT, 50, seed=3, **SIZES)
  places = sorted(WHOLE.index(question.context) for question in questions)
  assert min(np.diff(places)) >= 40 + 16


def test_a_seed_gives_the_same_questions_and_another_gives_others():
  first = continuation_questions(TEXT, 20, seed=3, **SIZES)
  assert continuation_questions(TEXT, 20, seed=3, **SIZES) == first
  assert continuation_questions(TEXT, 20, seed=4, **SIZES) != first


def test_one_question_is_as_it_was():
  """Draws are integers: the same on every machine, in every version."""
  [question] = continuation_questions(
    TEXT, 1, choices=2, context_bytes=8, choice_bytes=8, seed=0
  )
  assert question == Question('ds 00672', ('4 and 00', '06 holds'), 0)


def test_what_is_not_plain_is_not_asked_about():
  text = ''.join(LINES).replace('6', '\t').encode() + b'\n' * 999
  for question in continuation_questions(
    np.frombuffer(text, np.uint8), 5, **SIZES
  ):
    shown = question.context + ''.join(question.choices)
    assert '\t' not in shown and '\n\n\n' not in shown


@pytest.mark.parametrize(
  ('change', 'problem'),
  [
    ({'count': 10_000}, 'places to ask about, 10000 were wanted'),
    ({'count': 0}, 'count=0: must be at least 1'),
    ({'choices': 1}, 'choices=1: must be at least 2'),
    ({'context_bytes': 0}, 'context_bytes=0: must be at least 1'),
  ],
)
def test_a_text_that_does_not_suffice_is_refused(change, problem):
  with pytest.raises(ValueError, match=problem):
    continuation_questions(TEXT, **({'count': 9} | SIZES | change))


def test_a_text_that_repeats_itself_is_refused():
  """Three bytes in turn go on in three ways; four choices need four."""
  text = np.frombuffer(b'abc' * 500, np.uint8)
  with pytest.raises(ValueError, match='too few go on differently'):
    continuation_questions(text, 3, **SIZES)
