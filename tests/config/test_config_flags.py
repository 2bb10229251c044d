# SPDX-License-Identifier: Apache-2.0
"""--config on the command line, in processes of its own as users start it."""

import dataclasses
import os
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from diloco.config import __main__ as key_list
from diloco.config import config_files, flags, run_config, simulation
from diloco.data.sources import FORMATS, IN_MEMORY
from diloco.numerics.merge import RULES
from diloco.protocol.round_policy import QUORUM_RULES
from tests.commands import output, python, refused

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
  return python('-c', MAIN, *argv)


def test_overrides_reach_the_configuration_and_can_be_handed_on():
  done = start(
    '--config=experiments/quickstart.py:learners=4',
    '--config.outer.lr=1',
    '--noconfig.outer.nesterov',
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == (
    "OuterConfig(optimizer='sgd', lr=1.0, momentum=0.7, nesterov=False, "
    'b2=0.95, eps=0.1, anneal_fraction=0.1, final_lr=0.8, '
    'warmup_fraction=0.0) 4 '
    "['--config=experiments/quickstart.py:learners=4', "
    "'--config.outer.lr=1.0', '--config.outer.nesterov=false']\n"
  )


@pytest.mark.parametrize(
  ('argv', 'line'),
  [
    ([CONFIG, '--config.outer.lrr=1'], 'did you mean outer.lr?'),
    ([CONFIG, '--config.outer.lr=high'], 'must be of type float, such as 0.6'),
    ([CONFIG, '--config.protocol.fragments=5'], 'P must divide H'),
    ([CONFIG, '--confg=1'], "Unknown command line flag 'confg'"),
    ([CONFIG + ':quick'], "unknown argument 'quick' of the config"),
    (['--config=missing.py'], 'no such file'),
    (['--config=README.md'], '--config=README.md: can not be read as Python'),
    ([], '--config: is missing'),
  ],
)
def test_a_mistake_ends_in_one_line_and_code_78(argv, line):
  [said] = refused('-c', MAIN, *argv)
  assert said.startswith('error: ')
  assert line in said


def test_keys_without_a_file_change_the_defaults():
  said = output('-c', MAIN, '--config.outer.lr=0.5')
  assert said.startswith("OuterConfig(optimizer='sgd', lr=0.5, ")


def test_a_file_has_only_the_keys_that_it_changes(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(
    'def get_config():\n'
    "  return {'outer': {'lr': 1}, 'protocol': {'learners': 3}}\n"
  )
  values = _parse([f'--config={path}', '--config.outer.lr=0.5'])
  config = flags.load(values)
  assert (config.outer.lr, config.protocol.learners) == (0.5, 3)
  assert flags.load(_parse(flags.arguments(values))) == config
  path.write_text("def get_config():\n  return {'outer': {'lrr': 1}}\n")
  [said] = refused('-c', MAIN, f'--config={path}')
  assert 'outer.lrr: unknown key, did you mean outer.lr?' in said


@pytest.mark.parametrize(
  'path', ['experiments/quickstart.py', 'experiments/goodput.py']
)
def test_what_is_printed_is_a_file_that_comes_to_the_same(tmp_path, path):
  done = start(f'--config={path}', '--config.seed=9', '--print_config')
  assert done.returncode == 0, done.stderr
  printed = tmp_path / 'printed.py'
  printed.write_text(done.stdout)
  again = start(f'--config={printed}', '--print_config')
  assert again.stdout == done.stdout
  assert 'config.seed = 9\n' in done.stdout


def test_an_experiment_is_found_from_elsewhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  found = config_files.find('experiments/recipe.py:scale=12b')
  assert found == f'{config_files.EXPERIMENTS}/recipe.py:scale=12b'
  (tmp_path / 'experiments').mkdir()
  (tmp_path / 'experiments' / 'recipe.py').touch()
  mine = 'experiments/recipe.py'
  assert config_files.find(mine) == mine
  assert config_files.find('other/recipe.py') == 'other/recipe.py'


def test_what_differs_from_the_defaults_comes_to_the_same(tmp_path):
  config = run_config.unfold(dataclasses.asdict(flags.load(_parse([CONFIG]))))
  path = tmp_path / 'changed.py'
  path.write_text(
    config_files.source(config_files.non_default_keys(config), 'It.')
  )
  assert 'rope_theta' not in path.read_text()
  assert flags.load(_parse([f'--config={path}'])) == run_config.build(config)


def test_every_key_has_a_type_and_a_meaning():
  keys = key_list.of_run()
  assert {key.name for key in keys} == set(run_config.key_types())
  for kind in simulation.STUDIES:
    keys += key_list.of_simulation(kind)
  assert not [key.name for key in keys if len(key.meaning) < 4]
  alpha = next(key for key in keys if key.name == 'protocol.blend_alpha')
  assert (alpha.kind, alpha.default) == ('float', 0.0)
  assert alpha.meaning.endswith("of 'interpolate': the weight of θ.")


def test_choices_are_listed_as_they_are_registered():
  meanings = {key.name: key.meaning for key in key_list.of_run()}
  for key, choices in (
    ('data.source', (IN_MEMORY, FORMATS)),
    ('merge.rule', (RULES,)),
    ('protocol.quorum_rule', (QUORUM_RULES,)),
  ):
    for names in choices:
      assert f'one of {", ".join(names)}' in meanings[key]


def test_help_needs_no_configuration():
  done = start('--help')
  assert (done.returncode, done.stderr) == (0, '')
  assert '--config=FILE' in done.stdout


@pytest.mark.parametrize(
  'command, code',
  [
    (['-c', MAIN, '--help'], 141),
    (['-c', MAIN, CONFIG], 141),
    (['-m', 'diloco', '--help'], 0),
  ],
)
def test_a_reader_that_has_read_enough_is_no_error(command, code):
  """`| head` goes away; what is printed may be less than a buffer."""
  read, write = os.pipe()
  os.close(read)
  done = subprocess.run(
    [sys.executable, *command], stdout=write, stderr=subprocess.PIPE, text=True
  )
  os.close(write)
  assert (done.returncode, done.stderr) == (code, '')


@pytest.mark.parametrize(
  'words', ['--help', 'config', 'plan 5B --on=4xv5e-256 --gbps=2']
)
def test_a_command_whose_output_is_closed_does_its_work(words):
  started = ['bash', '-c', f'exec {sys.executable} -m diloco {words} >&-']
  done = subprocess.run(started, stderr=subprocess.PIPE, text=True)
  assert (done.returncode, done.stderr) == (0, '')


def test_a_broken_pipe_of_a_socket_is_an_error():
  broken = MAIN.replace(
    'config = flags.load()', 'raise BrokenPipeError("here")'
  )
  done = python('-c', broken, CONFIG)
  assert done.returncode == 1
  assert done.stderr.endswith('BrokenPipeError: here\n')


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
