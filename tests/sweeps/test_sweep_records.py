# SPDX-License-Identifier: Apache-2.0
"""Results that are kept beside an experiment, and seeds that are added."""

import dataclasses
import json
import math

import pytest

from diloco.config import run_config
from diloco.sweeps import making, records, sweep
from diloco.sweeps.records import Records
from diloco.sweeps.sweep import BadResult, SeedResult, Variant
from experiments import tests_tiny
from tests import commands

ROWS = (
  Variant('base', {}),
  Variant('other', {'outer.lr': 0.25}, against='base'),
)
LOSSES = {'base': 2.0, 'other': 2.1}


def asked(root, kept=None, seeds=(10, 11), **changes) -> making.Sweep:
  configs = making.make_configs(tests_tiny.get_config().to_dict(), ROWS)
  return making.Sweep(
    root, ROWS, configs, seeds, kept=kept or Records(None), **changes
  )


def result(loss: float, **changes) -> SeedResult:
  made = SeedResult(loss, loss, ((60, 1000, loss),), 3, 1.0, 0.9, 2.0)
  return dataclasses.replace(made, **changes)


def making_runs(spread=lambda seed: 0.0):
  """Returns what makes runs, and the names of those that were made."""
  made = []

  def make_runs(runs):
    for run in runs:
      made.append(run.name)
      loss = LOSSES[run.variant.label] + (
        spread(run.seed) if run.variant.against else 0.0
      )
      sweep.write_into(run.workdir.root, result(loss))
      yield run, 0

  return make_runs, made


def test_a_run_is_made_once_wherever_its_result_is(tmp_path, capsys):
  path = tmp_path / 'kept.json'
  make_runs, made = making_runs()
  first = asked(tmp_path / 'here', Records(path))
  assert making.make(first, make_runs, 'in turn', 'log') == 0
  assert made == [f'{x}, seed {n}' for n in (10, 11) for x in LOSSES]
  elsewhere = asked(tmp_path / 'there', Records(path), (10, 11, 12))
  assert making.make(elsewhere, make_runs, 'in turn', 'log') == 0
  assert made[4:] == ['base, seed 12', 'other, seed 12']
  said = capsys.readouterr()
  assert f'4 runs were made before: {tmp_path}' in said.err
  assert said.out.count('+5.00 ± 0.00 %') == 2


def test_a_run_counts_for_whoever_has_its_configuration(tmp_path):
  """A variant of another name, but none with another value or seed."""
  kept = Records(tmp_path / 'kept.json')
  run = asked(tmp_path).runs[1]
  kept.add('named otherwise', 10, records.flat(run.config), result(2.5))
  there = asked(tmp_path / 'there', Records(kept.path))
  assert there.recall() == 1
  assert [x.name for x in there.runs] == [
    'base, seed 10', 'base, seed 11', 'other, seed 11',
  ]  # fmt: skip
  assert sweep.read(there.root, 'other', 10) == result(2.5)
  making.check(there.configs, ROWS, there.seeds, there.root)


def test_a_result_that_is_in_its_folder_only_is_kept(tmp_path):
  """A sweep that is cut off after a run has not yet added it to the file."""
  kept = Records(tmp_path / 'kept.json')
  here = asked(tmp_path / 'here', kept, (10,))
  for run, loss in zip(here.runs, (2.5, 2.6), strict=True):
    sweep.write_into(run.workdir.root, result(loss))
  assert here.recall() == 0
  found = [
    Records(kept.path).find(records.flat(here.configs[label]), 10).loss
    for label in LOSSES
  ]
  assert found == [2.5, 2.6]


def test_a_run_of_another_experiment_counts_too(tmp_path):
  """It is taken where the experiment has none itself, and is not copied."""
  configs = asked(tmp_path).configs
  kept = Records(tmp_path / 'kept.json')
  for label, path, loss in (
    ('base', 'before.json', 2.5),
    ('other', 'before.json', 2.6),
    ('other', 'kept.json', 2.7),
  ):
    its = Records(tmp_path / path)
    its.add(label, 10, records.flat(configs[label]), result(loss))
  here = asked(tmp_path / 'there', Records(kept.path))
  assert here.recall() == 2
  found = [sweep.read(here.root, label, 10).loss for label in LOSSES]
  assert found == [2.5, 2.7]
  assert len(Records(kept.path).runs) == 1


def test_a_newer_run_of_a_seed_takes_the_place_of_the_older(tmp_path):
  kept = Records(tmp_path / 'kept.json')
  config = records.flat(asked(tmp_path).configs['base'])
  kept.add('base', 10, config, result(2.5))
  kept.add('base', 11, config, result(2.6))
  kept.add('base', 10, config | {'name': 'again'}, result(2.7))
  found = Records(kept.path)
  assert len(found.runs) == 2 and found.seeds == (10, 11)
  assert found.find(config, 10).loss == 2.7
  assert found.find(config, 11).loss == 2.6


def test_the_file_has_a_line_a_run_and_all_of_its_result(tmp_path):
  kept = Records(tmp_path / 'kept.json')
  full = result(
    1.23456789, average_loss=1.2, halves={'loss': (1.0, 2.0)}, code='abc'
  )
  kept.add('base', 3, {'outer.lr': 0.6, 'seed': 3}, full)
  kept.add('other', 3, {'outer.lr': 0.25, 'seed': 3}, full)
  lines = kept.path.read_text().splitlines()
  assert len(lines) == 5
  assert json.loads(lines[3])['changes'] == {'outer.lr': 0.25}
  found = Records(kept.path).find({'outer.lr': 0.25}, 3)
  seven = 1.234568
  curve = ((60, 1000, seven),)
  assert found == dataclasses.replace(
    full, loss=seven, learners_loss=seven, curve=curve
  )


def test_what_was_not_measured_is_left_out_of_the_file(tmp_path):
  kept = Records(tmp_path / 'kept.json')
  kept.add('base', 3, {'outer.lr': 0.6}, result(1.5, learners_loss=math.nan))
  json.loads(kept.path.read_text(), parse_constant=pytest.fail)
  found = Records(kept.path).find({'outer.lr': 0.6}, 3)
  assert math.isnan(found.learners_loss)
  assert found.average_loss is None


@pytest.mark.parametrize('text', ['[]', '{', '{"config": {}, "runs": [{}]}'])
def test_another_file_is_named(tmp_path, text):
  path = tmp_path / 'kept.json'
  path.write_text(text)
  with pytest.raises(BadResult, match=r'kept\.json: does not list runs'):
    Records(path)


def test_seeds_are_added_until_all_intervals_are_narrow(tmp_path, capsys):
  """The first four differ by 4 %, the others not at all."""
  make_runs, made = making_runs(lambda seed: 0.04 * (seed in (10, 11)))
  seeds = (10, 11, 12, 13)
  assert making.make(asked(tmp_path, None, seeds), make_runs, '', 'log') == 0
  wide = float(capsys.readouterr().out.split('±')[-1].split()[0])
  wanted = asked(tmp_path, None, seeds, width=wide / 200)
  assert making.make(wanted, make_runs, '', 'log') == 0
  last = int(made[-1].split()[-1])
  said = capsys.readouterr()
  assert 13 < last < 25
  assert f'with {last - 9} seeds from 10 on' in said.out
  assert 'other ± ' in said.err and 'one more seed' in said.err


def test_it_says_which_interval_stays_too_wide(tmp_path, capsys):
  make_runs, made = making_runs(lambda seed: 0.04 * (seed % 2))
  wanted = asked(tmp_path, None, (0, 1, 2), width=1e-4)
  assert making.make(wanted, make_runs, '', 'log') == 0
  assert made[-1] == 'other, seed 15'
  assert 'not within ± 0.01 % with 16 seeds from 0 on: other ±' in (
    capsys.readouterr().out
  )


def test_a_half_of_the_text_can_be_compared(tmp_path):
  halves = {'base': (1.0, 2.0), 'other': (1.1, 2.0)}
  for label, pair in halves.items():
    run = sweep.folder(tmp_path, label, 10)
    sweep.write_into(run, result(1.5, halves={'loss': pair}))
  found = [
    asked(tmp_path, None, (10,), half=half).compared('loss')[1].difference
    for half in (0, 1, None)
  ]
  assert found == pytest.approx([0.1, 0.0, 0.0])


def test_a_configuration_is_flat_and_as_json_has_it():
  config = run_config.build(tests_tiny.get_config())
  found = records.flat(config)
  assert found == json.loads(json.dumps(found))
  assert found['outer.lr'] == config.outer.lr


def test_results_of_variants_are_those_of_their_configurations(tmp_path):
  """A run of another configuration does not count for its label."""
  kept = Records(tmp_path / 'kept.json')
  for seed, changes in ((10, {}), (11, {'outer.momentum': 0.1})):
    for label, config in asked(tmp_path).configs.items():
      flat = records.flat(config) | changes
      kept.add(label, seed, flat, result(LOSSES[label]))
  base = tests_tiny.get_config().to_dict()
  found = making.kept_results(kept, base, ROWS)
  assert {label: [*each] for label, each in found.items()} == {
    'base': [10], 'other': [10],
  }  # fmt: skip
  assert found['other'][10].loss == LOSSES['other']


# By the command ---------------------------------------------------------------

EXPERIMENT = """
from experiments import tests_tiny

FIRST_SEED, HALF = 10, 'second'
get_config = tests_tiny.get_config

def sweep(add):
  add('base', {})
  add('other', {'outer.lr': 0.25}, against='base')
"""


@pytest.fixture
def experiment(tmp_path):
  """A file beside which six seeds of each variant are kept."""
  path = tmp_path / 'mine.py'
  path.write_text(EXPERIMENT)
  (tmp_path / records.FOLDER).mkdir()
  kept = Records(records.path_of(str(path)))
  for seed in range(10, 16):
    for label, config in asked(tmp_path).configs.items():
      halves = {'loss': (9.0, LOSSES[label])}
      made = result(5.0, average_loss=5.0, halves=halves)
      kept.add(label, seed, records.flat(config), made)
  return path


def lab(experiment, *flags, **how):
  words = '-m', 'diloco.lab', f'--config={experiment}', '--sweep', *flags
  return commands.python(
    *words, cwd=experiment.parent, PYTHONPATH=str(commands.ROOT), **how
  )


def test_the_command_of_a_claim_takes_what_is_kept(experiment):
  """Its seeds and its half of the text are the file's; no run is made."""
  done = lab(experiment, '--until_width=0.003')
  assert done.returncode == 0, done.stderr
  assert f'12 runs were made before: {experiment.parent}/records' in done.stderr
  assert '+5.00 ± 0.00 %' in done.stdout
  assert 'all within ± 0.3 %, with 6 seeds from 10 on' in done.stdout
  assert (experiment.parent / 'runs' / 'mine' / 'other' / 'seed-15').is_dir()


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--seeds=two'], '--seeds=two: must be a number of seeds, or FIRST:LAST'),
    (['--seeds=5:5'], '--seeds=5:5: must be a number of seeds, or FIRST:LAST'),
    (['--half=third'], 'third'),
  ],
)
def test_what_makes_no_sense_is_named(experiment, flags, message):
  done = lab(experiment, *flags)
  assert done.returncode == commands.EXIT_CONFIG
  assert message in done.stderr
  assert not (experiment.parent / 'runs').exists()


def test_a_run_needs_a_folder(experiment):
  words = '-m', 'diloco.lab', f'--config={experiment}'
  [said] = commands.refused(*words)
  assert '--workdir: is missing' in said
