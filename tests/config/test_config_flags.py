# SPDX-License-Identifier: Apache-2.0
"""--config on the command line, in processes of its own as users start it."""

import subprocess
import sys

import pytest
from absl import flags as absl_flags

from diloco.config import flags

MAIN = """
from diloco.config import flags
flags.define_flags()

def main(argv):
  config = flags.load()
  print(config.outer, config.protocol.learners, flags.arguments())

flags.run(main)
"""
CONFIG = '--config=experiments/quickstart.py'


def start(*argv):
  return subprocess.run(
    [sys.executable, '-c', MAIN, *argv],
    capture_output=True,
    text=True,
    timeout=60,
  )


def test_overrides_reach_the_configuration_and_can_be_handed_on():
  done = start(
    '--config=experiments/quickstart.py:learners=4',
    '--config.outer.lr=1',
    '--noconfig.outer.nesterov',
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == (
    "OuterConfig(optimizer='sgd', lr=1.0, momentum=0.7, nesterov=False, "
    'b2=0.95, eps=0.1, anneal_fraction=0.1, final_lr=0.8) 4 '
    "['--config=experiments/quickstart.py:learners=4', "
    "'--config.outer.lr=1.0', '--config.outer.nesterov=false']\n"
  )


@pytest.mark.parametrize(
  ('argv', 'line'),
  [
    ([CONFIG, '--config.outer.lrr=1'], 'did you mean outer.lr?'),
    ([CONFIG, '--config.outer.lr=high'], "convert string to float: 'high'"),
    ([CONFIG, '--config.protocol.fragments=5'], 'P must divide H'),
    ([CONFIG, '--confg=1'], "Unknown command line flag 'confg'"),
    ([CONFIG + ':quick'], "unknown argument 'quick' of the config"),
    (['--config=missing.py'], 'no such file'),
    (['--config=README.md'], '--config=README.md: can not be read as Python'),
    (['--confg=experiments/c4.py'], 'unknown flag, did you mean --config?'),
    ([CONFIG, '--config.outer.learning_rate=1'], 'did you mean outer.lr?'),
    ([], '--config: is missing'),
    (['--config.outer.lr=1'], '--config: is missing'),
  ],
)
def test_a_mistake_ends_in_one_line_and_code_78(argv, line):
  done = start(*argv)
  assert done.returncode == 78
  assert done.stdout == ''
  assert done.stderr.startswith('error: ')
  assert done.stderr.count('\n') == 1, done.stderr
  assert line in done.stderr


def test_help_needs_no_configuration():
  done = start('--help')
  assert 'USAGE' in done.stdout
  assert 'Traceback' not in done.stderr


def test_arguments_give_the_same_configuration_again():
  first = _parse(
    [
      CONFIG,
      '--config.name=a-b',
      "--config.faults=('kill learner 0 at 0.1', 'kill syncer at 0.2')",
      '--config.model.tied=true',
      '--config.inner.lr=0.00025',
      '--config.seed=7',
    ]
  )
  again = _parse(flags.arguments(first))
  assert flags.load(again) == flags.load(first)
  assert flags.load(again).faults[1] == 'kill syncer at 0.2'


def _parse(arguments):
  argv = ['main', *arguments]
  values = absl_flags.FlagValues()
  flags.define_flags(values, argv)
  flags.parse(argv, values)
  return values
