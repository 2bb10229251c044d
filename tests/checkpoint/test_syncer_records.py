# SPDX-License-Identifier: Apache-2.0
"""A restarted syncer goes on from the last close, to the bit."""

import dataclasses
import os
import resource
import threading

import numpy as np
import pytest

from diloco.checkpoint import store, syncer_records
from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.parameters import read_parameters, write_parameters
from diloco.checkpoint.syncer_records import SyncerRecords
from diloco.config import run_config
from diloco.metrics.workdir import Workdir
from diloco.protocol.syncer.state import LearnerAccount, Ledger
from diloco.protocol.values import Ema
from diloco.run.spec import make_run_spec
from diloco.syncer.outer_state import OuterState
from diloco.syncer.stats import RunStats
from diloco.syncer.storage import SyncerDisk
from tests.in_process.lockstep import toy_config, toy_model

pytestmark = pytest.mark.beside

SAVE_S = 60.0
CRCS = (5, 6)
BATCH = 8
LEDGER = Ledger(
  step=7,
  clocks=((0, 9),),
  closed_round=1,
  versions=(1, 0),
  accounts=((0, LearnerAccount(5, 7, {0: 0}, 700)),),
  quorum_s=Ema(0.5),
  sync_s=Ema(),
  usual_norms=(2.5, None),
  last_round=3,
  ended=False,
)


@pytest.fixture(scope='module')
def run_spec():
  config = toy_config(
    learners=1, fragments=2, sync_every_steps=4, overlap_steps=1, quorum=1
  )
  config.codec.update(up='int4', down='int4', block_size=8)
  return make_run_spec(run_config.build(config), toy_model())


def _delta(model, fragment, seed):
  rng = np.random.default_rng(seed)
  return {
    name: rng.normal(size=x.shape).astype(np.float32)
    for name, x in model.state(fragment).theta.items()
  }


def _records(folder, said=None, every_rounds=4):
  said = [] if said is None else said
  states = folder / 'states'
  return SyncerRecords(folder, states, 2, every_rounds, said.append, BATCH)


def _close(model, fragment, seed):
  """Closes one round of a fragment, as the syncer does."""
  delta = _delta(model, fragment, seed)
  model.install(fragment, model.outer_step(fragment, {0: delta}, {0: 1.0}))


def _states(model):
  return [model.state(0), model.state(1)]


@pytest.fixture
def trained(run_spec):
  """A model with momentum and residuals: versions 2 and 1."""
  model = OuterState(run_spec)
  for seed, fragment in enumerate((0, 1, 0)):
    _close(model, fragment, seed)
  return model


# The ledger -------------------------------------------------------------------


def test_a_folder_without_a_close_is_a_new_run(tmp_path):
  assert _records(tmp_path / 'syncer').read_ledger() is None


def test_a_ledger_of_something_else_is_named(tmp_path):
  (tmp_path / 'ledger.json').write_text('{"step": 1}')
  with pytest.raises(BrokenRecord, match=r'ledger\.json'):
    _records(tmp_path).read_ledger()


def _later(ledger):
  return dataclasses.replace(ledger, closed_round=2, versions=(1, 1))


def _write_two(folder):
  """Writes two closes; returns the file of the second."""
  records = _records(folder)
  records.write_ledger(LEDGER, {}, CRCS)
  records.write_ledger(_later(LEDGER), {}, CRCS)
  return folder / 'ledger.json'


def test_one_changed_bit_of_a_ledger_is_never_another_run(tmp_path):
  path = _write_two(tmp_path)
  previous = tmp_path / 'ledger.previous.json'
  whole, before = path.read_bytes(), previous.read_bytes()
  for bit in range(8 * len(whole)):
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    previous.write_bytes(before)
    said = []
    assert _records(tmp_path, said).read_ledger() == (LEDGER, {}, CRCS), bit
    assert any('passed over' in line for line in said), (bit, said)


def test_a_changed_digit_of_the_only_ledger_is_said_or_refused(tmp_path):
  records = _records(tmp_path)
  records.write_ledger(LEDGER, {}, CRCS)
  path = tmp_path / 'ledger.json'
  whole = path.read_bytes()
  digits = [i for i, c in enumerate(whole) if chr(c).isdigit()]
  assert len(digits) > 20
  for at in digits:
    changed = bytearray(whole)
    changed[at] = ord('9') - (changed[at] - ord('0'))
    path.write_bytes(changed)
    said = []
    assert _records(tmp_path, said).read_ledger() is None  # Learners know.
    assert any('passed over' in line for line in said), (at, said)


def test_a_crash_between_two_names_of_the_ledger_goes_on_from_the_last(
  tmp_path,
):
  _write_two(tmp_path).unlink()
  said = []
  assert _records(tmp_path, said).read_ledger() == (LEDGER, {}, CRCS)
  assert any('ledger.previous.json, round 1' in line for line in said)


@pytest.mark.parametrize('sync', [False, True])
def test_a_full_disk_leaves_the_last_ledger_and_nothing_else(tmp_path, sync):
  records = SyncerRecords(tmp_path, tmp_path / 'states', 2, 4, print, sync)
  records.write_ledger(LEDGER, {}, CRCS)
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
  try:
    with pytest.raises(OSError, match='too large'):
      records.write_ledger(_later(LEDGER), {}, CRCS)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
  assert [path.name for path in tmp_path.iterdir()] == ['ledger.json']
  assert records.read_ledger() == (LEDGER, {}, CRCS)


def test_a_checkpoint_newer_than_the_ledger_is_gone_on_from(trained, tmp_path):
  said = []
  records = _records(tmp_path, said)
  records.write_ledger(LEDGER, {}, CRCS)
  record = _later(LEDGER), {'a': 2}, CRCS
  assert records.save(2, _states(trained), ledger=record)
  records.close(SAVE_S)
  assert _records(tmp_path, said).read_ledger() == record
  assert any('goes on from the checkpoint of round 2' in x for x in said), said


def test_a_folder_is_one_process_s(tmp_path, monkeypatch):
  monkeypatch.setattr(syncer_records, 'LOCK_S', 0.2)
  first, second = _records(tmp_path), _records(tmp_path)
  first.occupy()
  with pytest.raises(BrokenRecord, match=f'in use by process {os.getpid()} of'):
    second.occupy()
  first.close(SAVE_S)
  second.occupy()
  second.close(SAVE_S)


def test_checkpoints_without_their_ledger_are_no_new_run(trained, tmp_path):
  records = _records(tmp_path)
  assert records.save(3, _states(trained))
  records.close(SAVE_S)
  with pytest.raises(BrokenRecord, match='a checkpoint of round 3'):
    _records(tmp_path).read_ledger()


# The states -------------------------------------------------------------------


def test_a_restored_model_makes_the_same_next_step(run_spec, trained, tmp_path):
  records = _records(tmp_path)
  assert records.save(3, _states(trained))
  records.close(SAVE_S)
  twin = OuterState(run_spec)
  versions, states = _records(tmp_path).restore(_states(twin))
  assert versions == (2, 1)
  for fragment, state in enumerate(states):
    assert state.version == versions[fragment]
    twin.restore(fragment, state)
  assert twin.crcs() == trained.crcs()
  for fragment in (0, 1):
    delta = _delta(trained, fragment, 9)
    outcome = trained.outer_step(fragment, {0: delta}, {0: 1.0})
    twin_outcome = twin.outer_step(fragment, {0: delta}, {0: 1.0})
    assert twin_outcome.crc == outcome.crc
    np.testing.assert_array_equal(twin_outcome.data, outcome.data)


def test_rounds_that_close_meanwhile_do_not_change_what_is_saved(
  trained, tmp_path
):
  records, before = _records(tmp_path), _states(trained)
  assert records.save(3, before)
  _close(trained, 1, seed=7)
  records.close(SAVE_S)
  _, [_, state] = records.restore(before)
  assert state.version == 1
  for name, array in before[1].theta.items():
    np.testing.assert_array_equal(state.theta[name], array)


def test_parameters_come_back_as_they_were(tmp_path):
  params = {'a/b': np.arange(6, dtype=np.float32).reshape(2, 3)}
  write_parameters(tmp_path / 'parameters', params)
  found = read_parameters(tmp_path / 'parameters')
  np.testing.assert_array_equal(found['a/b'], params['a/b'])


def test_the_last_close_is_saved_after_the_save_in_progress(
  run_spec, trained, tmp_path, monkeypatch
):
  """No learner is left then from which a fragment could be recovered."""
  write, wait = store.Checkpoints._write, SyncerRecords.wait
  passes = threading.Semaphore(0)

  def wait_and_write(*arguments):
    assert passes.acquire(timeout=SAVE_S)
    write(*arguments)

  def let_pass_and_wait(records, timeout_s):
    passes.release()
    return wait(records, timeout_s)

  monkeypatch.setattr(store.Checkpoints, '_write', wait_and_write)
  monkeypatch.setattr(SyncerRecords, 'wait', let_pass_and_wait)
  workdir, stats = Workdir(tmp_path), RunStats(run_spec.config)
  disk = SyncerDisk(run_spec, workdir, trained, stats)
  disk.occupy()
  disk.save(LEDGER, CRCS)
  ended = dataclasses.replace(LEDGER, closed_round=3, last_round=3, ended=True)
  disk.keep(ended, CRCS)
  assert disk.saved_round == 3
  assert _records(workdir.syncer)._states.newest_step == 3
  disk.close()
