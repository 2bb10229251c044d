# SPDX-License-Identifier: Apache-2.0
"""The configurations of a sweep, and finished runs that have another."""

import json

import pytest

from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.metrics import files
from diloco.metrics.workdir import Workdir
from diloco.sweeps import making, sweep
from diloco.sweeps.sweep import SeedResult, Variant
from experiments import common

ROWS = [
  Variant('base', {}),
  Variant('other', {'outer.lr': 0.25, 'seed': 3, 'lab.system': 'alone'}),
]


def made(rows=ROWS):
  return making.make_configs(common.base().to_dict(), rows)


def finish(workdir, label, config):
  run = sweep.folder(workdir, label, 0)
  sweep.write_into(
    run, SeedResult(1.0, 1.0, ((10, 100, 1.0),), 3, 1.0, 0.9, 2.0)
  )
  files.write_json(Workdir(run).config, config)


def test_variants_change_keys_and_nothing_else():
  base, other = made().values()
  assert base.outer.lr == common.base().outer.lr
  assert (other.outer.lr, other.seed, other.lab.system) == (0.25, 3, 'alone')
  assert other.inner == base.inner


def test_wrong_variants_are_named_all_at_once():
  rows = [
    Variant('a', {'outer.rl': 1.0}),
    Variant('b', {'outer.lr': 'much'}),
    Variant('c', {'protocol.learners': 0}),
  ]
  with pytest.raises(ConfigError) as refused:
    made(rows)
  problems = '\n'.join(refused.value.problems)
  assert "'a': outer.rl" in problems
  assert "'b': outer.lr" in problems
  assert "'c': protocol.learners=0" in problems


def test_name_and_seed_do_not_make_it_another(tmp_path):
  configs = made()
  [older] = made([Variant('base', {'name': 'older', 'seed': 7})]).values()
  finish(tmp_path, 'base', older)
  making.check(configs, ROWS, [0], tmp_path)


def test_a_finished_run_that_was_configured_otherwise_is_refused(tmp_path):
  configs = made()
  finish(tmp_path, 'other', configs['base'])
  with pytest.raises(ConfigError) as refused:
    making.check(configs, ROWS, [0], tmp_path)
  [problem] = refused.value.problems
  assert str(sweep.folder(tmp_path, 'other', 0)) in problem
  assert 'outer.lr=0.6 there, 0.25 here' in problem
  assert 'remove it, or use another --workdir' in problem


def test_a_run_of_before_a_key_was_there_counts_where_it_is_left_alone(
  tmp_path,
):
  configs = made()
  for label in configs:
    finish(tmp_path, label, configs[label])
    path = Workdir(sweep.folder(tmp_path, label, 0)).config
    fields = json.loads(path.read_text())
    del fields['lab']['system'], fields['inner']['lr']
    path.write_text(json.dumps(fields))
  with pytest.raises(ConfigError) as refused:
    making.check(configs, ROWS, [0], tmp_path)
  [problem] = refused.value.problems
  assert 'other' in problem
  assert '(lab.system=None there, alone here)' in problem


def test_values_of_a_key_are_compared_with_the_first():
  rows = sweep.variants(
    sweep.of_values('outer.lr=0.3,0.6,1', run_config.key_types())
  )
  assert [row.label for row in rows] == [
    'outer.lr = 0.3', 'outer.lr = 0.6', 'outer.lr = 1',
  ]  # fmt: skip
  assert [row.against for row in rows] == [None, *2 * ['outer.lr = 0.3']]
  assert rows[2].at == (('outer.lr', 'outer.lr = 0.3', 1.0),)
  assert [c.outer.lr for c in made(rows).values()] == [0.3, 0.6, 1.0]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('outer.lr', 'must be KEY=V1,V2'),
    ('outer.lr=0.3', 'must be KEY=V1,V2'),
    ('outer.lr=0.3,0.3', 'each once'),
    ('outer.lr=0.3,x', 'values of outer.lr must be float'),
    ('protocol.fragments=1.5,2', 'values of protocol.fragments must be int'),
  ],
)
def test_values_that_can_not_be_are_refused(text, message):
  with pytest.raises(ValueError, match=message):
    sweep.of_values(text, run_config.key_types())
