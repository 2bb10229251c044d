# SPDX-License-Identifier: Apache-2.0
"""--log_json: whatever Python says on stderr, each line is one record."""

import datetime
import json
import logging
import subprocess
import sys

import pytest

from diloco.config import flags
from diloco.run import logs

PROLOGUE = """
import logging, sys, threading, warnings
from absl import app
from absl import logging as absl_logging
from diloco.run import logs

def main(argv):
  logs.keep_ours('first', learner=3, host=1)
  does()

logs.write_json('learner')
"""


def _said(does: str, code: int = 0) -> list[dict]:
  """Returns what a main that `does` this has written."""
  body = ''.join(f'  {line}\n' for line in does.splitlines())
  script = f'{PROLOGUE}\ndef does():\n{body}\napp.run(main)\n'
  ended = subprocess.run(
    [sys.executable, '-c', script], capture_output=True, text=True, timeout=240
  )
  assert ended.returncode == code, ended.stderr
  return [json.loads(line) for line in ended.stderr.splitlines()]


def test_who_said_what_when():
  (record,) = _said('absl_logging.warning("%d is odd", 3)')
  made_at = datetime.datetime.fromisoformat(record.pop('time'))
  assert made_at.utcoffset() == datetime.timedelta(0)
  assert record == {
    'severity': 'WARNING',
    'message': '3 is odd',
    'role': 'learner',
    'run': 'first',
    'learner': 3,
    'host': 1,
  }


@pytest.mark.parametrize(
  'does, severity, message',
  [
    ('absl_logging.error("a\\nb")', 'ERROR', 'a\nb'),
    ('logging.getLogger("x").warning("theirs")', 'WARNING', 'theirs'),
    ('print("error: such", file=sys.stderr)', 'ERROR', 'such'),
    ('print("so", 3, file=sys.stderr)', 'INFO', 'so 3'),
    ('print("no end", end="", file=sys.stderr)', 'INFO', 'no end'),
  ],
)
def test_what_is_a_record(does, severity, message):
  (record,) = _said(does)
  assert (record['severity'], record['message']) == (severity, message)


@pytest.mark.parametrize(
  'does, code, parts',
  [
    ('raise ValueError("a\\nb")', 1, ['Traceback', 'ValueError: a\nb']),
    (
      'def raises(): raise KeyError("k")\n'
      'thread = threading.Thread(target=raises, name="worker")\n'
      'thread.start(); thread.join()',
      0,
      ['in thread worker', 'Traceback', "KeyError: 'k'"],
    ),
    (
      'try: 1 / 0\nexcept ZeroDivisionError: absl_logging.exception("odd")',
      0,
      ['odd\nTraceback', 'ZeroDivisionError'],
    ),
    ('warnings.warn("old way")', 0, ['UserWarning: old way']),
  ],
)
def test_a_traceback_is_one_record(does, code, parts):
  (record,) = _said(does, code)
  for part in parts:
    assert part in record['message']


def test_what_libraries_say_below_a_warning_is_no_record():
  assert _said('logging.getLogger("x").info("theirs")') == []


@pytest.mark.parametrize(
  'place, is_kept',
  [
    ('diloco/learner/train_loop.py', True),
    ('.venv/lib/python3.12/site-packages/jax/_src/xla_bridge.py', False),
  ],
)
def test_a_checkout_named_diloco_does_not_own_its_environment(
  monkeypatch, place, is_kept
):
  monkeypatch.setattr(logs, 'OURS', '/home/me/diloco/diloco/')
  record = logging.LogRecord(
    'absl', logging.INFO, f'/home/me/diloco/{place}', 1, 'said', None, None
  )
  assert logs._is_ours_or_grave(record) == is_kept


@pytest.mark.parametrize(
  'word, asked',
  [
    ('--log_json', True),
    ('-log_json', True),
    ('--log_json=True', True),
    ('--log_json=false', False),
    ('--nolog_json', False),
    ('--log_json_too', False),
  ],
)
def test_it_is_known_before_flags_are_read(word, asked):
  assert flags.asks_for_json(['main', word, '--colour']) == asked


@pytest.mark.parametrize('main', ['syncer', 'learner', 'evaluator', 'evaluate'])
def test_every_main_refuses_in_json(main):
  """An unknown flag is refused in JSON, too, when nothing is known yet."""
  ended = subprocess.run(
    [sys.executable, '-m', f'diloco.{main}', '--log_json', '--colour=red'],
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert ended.returncode == 78
  (record,) = map(json.loads, ended.stderr.splitlines())
  asked = 'RUN' if main.startswith('evaluat') else '--config'
  assert record['message'].startswith(f'{asked}: is missing')
  assert (record['severity'], record['role']) == ('ERROR', main)
