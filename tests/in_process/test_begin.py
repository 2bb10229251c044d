# SPDX-License-Identifier: Apache-2.0
"""A run that begins with the parameters and moments of a data-parallel one."""

import dataclasses

import jax
import numpy as np
import pytest

from diloco import begin
from diloco.checkpoint.learner_records import HeldState, LearnerRecords
from diloco.config import run_config
from diloco.learner import restore
from diloco.metrics import files, token_ledger
from diloco.metrics.workdir import Workdir, learner_name
from diloco.numerics import outer
from diloco.run.spec import make_run_spec
from diloco.syncer.outer_state import OuterState
from diloco.syncer.stats import RunStats
from diloco.syncer.storage import SyncerDisk
from experiments import tests_tiny
from tests.in_process.in_process import LEARNERS, PATIENCE, Run
from tests.transport.faulty import Faults

STEP = 21
SEED = 7


def _config(**changes):
  config = tests_tiny.get_config()
  config.model.update(kind='bowl', layers=2, d_ff=128)
  config.protocol.update(learners=LEARNERS, quorum=1, total_steps=100)
  config.update_from_flattened_dict(changes)
  return run_config.build(config)


def _one(folder, **changes):
  """Makes the folder of a run of one learner, with a checkpoint of STEP."""
  rows = LEARNERS * _config().data.batch
  alone = {'protocol.learners': 1, 'data.batch': rows}
  config = _config(**{**alone, **changes})
  run_spec = make_run_spec(config)
  rng = np.random.default_rng(SEED)
  print(f'seed {SEED}')

  def drawn(like):  # No second moment may be negative.
    return (0.1 * rng.random(like.shape)).astype(like.dtype)

  params = {
    path: drawn(np.zeros(shape, np.float32))
    for path, shape in run_spec.shapes.items()
  }
  inner = jax.tree.map(drawn, jax.eval_shape(run_spec.inner.init, params))
  one = Workdir(folder)
  records = LearnerRecords(
    one.checkpoints('learner-0'), 0, run_spec.fingerprints, 1, say=print
  )
  bases = dict(enumerate(run_spec.fragments_of(params)))
  held = HeldState(params, inner)
  # It has lost a step: its rows are taken all the same.
  progress = {'step': STEP, 'rows': (STEP + 1) * rows}
  records.save_state(STEP, held, lambda: bases, progress)
  records.close(60.0)
  files.write_json(one.config, dataclasses.asdict(config))
  return one, params, inner


def _equal(here, there):
  here, there = jax.tree.leaves(here), jax.tree.leaves(there)
  assert len(here) == len(there)
  for x, y in zip(here, there):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('shards', [1, 2])
def test_all_learners_go_on_from_parameters_and_moments(tmp_path, shards):
  one, params, inner = _one(tmp_path / 'one')
  workdir = Workdir(tmp_path / 'run')
  config = _config(**{'protocol.patience': PATIENCE, 'syncer.shards': shards})
  assert begin.begin(config, workdir, one) == STEP
  run = Run(workdir.root, Faults(), shards=shards)
  for learner in range(LEARNERS):
    records = LearnerRecords(
      workdir.checkpoints(learner_name(learner)), learner,
      run.run_spec.fingerprints, 1, say=print, owned=False,
    )  # fmt: skip
    restored = restore.restore(run.run_spec, run.programs, records)
    start = restored.start
    assert (start.step, start.rows) == (STEP, (STEP + 1) * config.data.batch)
    _equal(restored.params, params)
    _equal(restored.inner_state, inner)
  run.finish()
  assert run.tape('Started')[0]['closed_round'] == STEP // 2
  first = run.tape('Publish')[0]
  assert (first['round'], first['step'] > STEP) == (STEP // 2 + 1, True)
  rows = token_ledger.rows_of(workdir, config.protocol.fragments)
  assert len(rows) == LEARNERS * config.protocol.fragments
  for where, row in rows.items():
    assert row.unexplained == 0, (where, row)


def test_the_outer_optimizer_has_the_rounds_behind_it(tmp_path):
  one, params, _ = _one(tmp_path / 'one')
  config = _config(**{'outer.anneal_fraction': 0.5})
  workdir = Workdir(tmp_path / 'run')
  begin.begin(config, workdir, one)
  run_spec = make_run_spec(config)
  model = OuterState(run_spec)
  disk = SyncerDisk(run_spec, workdir, model, RunStats(config))
  machine = disk.begin()
  versions = config.protocol.versions_at(STEP // 2)
  assert machine.ledger().versions == model.versions() == versions
  for p, theta in enumerate(run_spec.fragments_of(params)):
    fresh = outer.init(theta, run_spec.outer).optimizer_state
    state = model.state(p)
    _equal(state.theta, theta)
    assert state.optimizer_state.rounds == versions[p]
    _equal(state.optimizer_state.sgd, fresh.sgd)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'data.batch': 4}, 'data.batch=4, must be 8'),
    ({'seed': 1}, 'seed=1, must be 0'),
    ({'protocol.learners': 2}, 'protocol.learners=2, must be 1'),
    ({'data.grammar_bytes': 1 << 15}, 'another text'),
  ],
)
def test_another_kind_of_run_is_refused(tmp_path, changes, message):
  one, _, _ = _one(tmp_path / 'one', **changes)
  with pytest.raises(ValueError, match=message):
    begin.begin(_config(), Workdir(tmp_path / 'run'), one)
  assert not (tmp_path / 'run').exists()


def test_another_model_is_refused(tmp_path):
  one, _, _ = _one(tmp_path / 'one', **{'model.d_ff': 64})
  with pytest.raises(begin.BrokenRecord, match='of this model'):
    begin.begin(_config(), Workdir(tmp_path / 'run'), one)


def test_a_folder_in_use_is_refused(tmp_path):
  one, _, _ = _one(tmp_path / 'one')
  with pytest.raises(ValueError, match='holds something'):
    begin.begin(_config(), Workdir(tmp_path / 'one'), one)


def test_an_outer_adam_begins_with_no_rounds_behind_it(tmp_path):
  """Its count corrects moments that are still 0."""
  one, _, _ = _one(tmp_path / 'one')
  own = {'outer.optimizer': 'adam', 'outer.anneal_fraction': 0.0}
  config, workdir = _config(**own), Workdir(tmp_path / 'run')
  begin.begin(config, workdir, one)
  run_spec = make_run_spec(config)
  model = OuterState(run_spec)
  SyncerDisk(run_spec, workdir, model, RunStats(config)).begin()
  assert [model.state(p).version > 0 for p in model.owned] == [True, True]
  assert [model.state(p).optimizer_state.rounds for p in model.owned] == [0, 0]
