# SPDX-License-Identifier: Apache-2.0
"""Scenarios that a reviewer can read aloud: `tests/protocol/transcripts`.

A block is a command, a line `----`, and what the machine answers. The first
command sets the stage (`syncer`, `learner`, `cluster` with their options).
`pytest tests/protocol --rewrite` writes the answers of today.
"""

import ast
import pathlib

import pytest

from tests.protocol.stages import STAGES

FOLDER = pathlib.Path(__file__).parent / 'transcripts'
RULE = '----'


def _parse(line: str) -> tuple[str, dict]:
  """'offer learner=0 round=1' → ('offer', {'learner': 0, 'round': 1})."""
  command, *pairs = line.split()
  options = {}
  for pair in pairs:
    key, _, value = pair.partition('=')
    try:
      options[key] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      options[key] = value
  return command, options


def _play(text: str) -> str:
  """The transcript as the machines speak it today."""
  out, stage = [], None
  for block in text.strip().split('\n\n'):
    comments = [line for line in block.splitlines() if line.startswith('#')]
    commands = []
    for line in block.splitlines()[len(comments) :]:
      if line == RULE:
        break
      commands.append(line)
    answers = []
    for line in commands:
      command, options = _parse(line)
      if command in STAGES:
        stage = STAGES[command](**options)
        answers.append('ok')
      elif command in ('status', 'records'):
        answers += getattr(stage, command)()
      else:
        answers += stage.say(command, options)
    if commands:
      answers = [RULE, *(answers or ['(nothing)'])]
    out.append('\n'.join([*comments, *commands, *answers]))
  return '\n\n'.join(out) + '\n'


@pytest.mark.parametrize('name', sorted(p.stem for p in FOLDER.glob('*.txt')))
def test_transcript(name, request):
  path = FOLDER / f'{name}.txt'
  expected = path.read_text()
  played = _play(expected)
  if request.config.getoption('--rewrite'):
    path.write_text(played)
  assert played == path.read_text()
