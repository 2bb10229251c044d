# SPDX-License-Identifier: Apache-2.0
"""A restarted syncer goes on from the last close, to the bit."""

import numpy as np
import pytest

from diloco import config as configs
from diloco.checkpoint.parameters import read_parameters, write_parameters
from diloco.checkpoint.syncer_records import BrokenRecord, SyncerRecords
from diloco.protocol import messages, syncer_io
from diloco.protocol.members import Account
from diloco.protocol.state import Ledger
from diloco.protocol.syncer import Syncer
from diloco.runtime.blueprint import make_blueprint
from diloco.runtime.global_model import GlobalModel
from diloco.sim.contents import FINGERPRINTS, RUN
from tests.protocol.stages import config_of
from tests.runtime.lockstep import toy_config, toy_model

LEDGER = Ledger(
  step=7,
  closed_round=1,
  versions=(1, 0),
  accounts=((0, Account(5, 7, {0: 0}, 700)),),
  ended=False,
)


@pytest.fixture(scope='module')
def blueprint():
  config = toy_config(
    learners=1, fragments=2, sync_every_steps=4, overlap_steps=1, quorum=1
  )
  config.codec.update(up='int4', down='int4', block_size=8)
  return make_blueprint(configs.build(config), toy_model())


def _delta(model, fragment, seed):
  rng = np.random.default_rng(seed)
  return {
    name: rng.normal(size=x.shape).astype(np.float32)
    for name, x in model.state(fragment).theta.items()
  }


def _close(model, records, fragment, seed):
  """One round of a fragment, as the syncer closes it."""
  delta = _delta(model, fragment, seed)
  outcome = model.outer_step(fragment, {0: delta}, {0: 1.0})
  records.write_fragment(fragment, outcome.state)
  model.install(fragment, outcome)


def test_a_restored_model_makes_the_same_next_step(blueprint, tmp_path):
  model, records = GlobalModel(blueprint), SyncerRecords(tmp_path)
  _close(model, records, 0, seed=1)
  twin = GlobalModel(blueprint)
  twin.restore(0, records.read_fragment(0, 1, twin.state(0)))
  delta = _delta(model, 0, 2)
  outcome = model.outer_step(0, {0: delta}, {0: 1.0})
  twin_outcome = twin.outer_step(0, {0: delta}, {0: 1.0})
  assert twin_outcome.crc == outcome.crc
  np.testing.assert_array_equal(twin_outcome.data, outcome.data)


def test_the_ledger_comes_back_as_it_was(tmp_path):
  records = SyncerRecords(tmp_path)
  records.write_ledger(LEDGER, {'a': 1})
  assert records.read_ledger() == (LEDGER, {'a': 1})


def test_a_folder_without_a_close_is_a_new_run(tmp_path):
  assert SyncerRecords(tmp_path / 'syncer').read_ledger() is None


def test_a_round_that_was_not_committed_did_not_close(blueprint, tmp_path):
  """Killed between the fragment's file and the ledger."""
  model, records = GlobalModel(blueprint), SyncerRecords(tmp_path)
  _close(model, records, 0, seed=1)
  records.write_ledger(LEDGER, {})
  before = model.state(0)
  _close(model, records, 0, seed=2)
  ledger, _ = records.read_ledger()
  found = records.read_fragment(0, ledger.versions[0], model.state(0))
  for name, array in before.theta.items():
    np.testing.assert_array_equal(found.theta[name], array)


def test_old_files_do_not_pile_up(blueprint, tmp_path):
  model, records = GlobalModel(blueprint), SyncerRecords(tmp_path)
  for version in range(1, 6):
    _close(model, records, 0, seed=version)
    records.write_ledger(
      Ledger(version, 2 * version, (version, 0), (), False), {}
    )
  assert len(list(tmp_path.glob('fragment-*'))) == 1


def test_a_broken_file_is_named(blueprint, tmp_path):
  model, records = GlobalModel(blueprint), SyncerRecords(tmp_path)
  _close(model, records, 0, seed=1)
  [path] = tmp_path.glob('fragment-*')
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(BrokenRecord, match=path.name):
    records.read_fragment(0, 1, model.state(0))


def test_a_missing_file_is_named(blueprint, tmp_path):
  model, records = GlobalModel(blueprint), SyncerRecords(tmp_path)
  with pytest.raises(BrokenRecord, match='fragment-000-000003'):
    records.read_fragment(0, 3, model.state(0))


def test_a_ledger_of_something_else_is_named(tmp_path):
  (tmp_path / 'ledger.json').write_text('{"step": 1}')
  with pytest.raises(BrokenRecord, match=r'ledger\.json'):
    SyncerRecords(tmp_path).read_ledger()


def _hello(incarnation, versions):
  return syncer_io.Heard(
    0,
    incarnation,
    messages.Hello(
      messages.PROTOCOL_VERSION,
      RUN,
      0,
      incarnation,
      FINGERPRINTS,
      versions,
      'address',
    ),
  )


def test_a_resumed_machine_knows_what_was_merged():
  """The same steps, offered again to the restarted syncer, are void."""
  machine = Syncer.resume(config_of({}), RUN, FINGERPRINTS, LEDGER)
  assert machine.ledger() == LEDGER
  machine.handle(_hello(6, (0, 0)), 1.0)
  machine.handle(syncer_io.Heard(0, 6, messages.Ready()), 1.0)
  offer = messages.Offer(3, 0, 0, 4, 400, 8, messages.Payload(1, 'int4', 1, 0))
  [effect] = machine.handle(syncer_io.Heard(0, 6, offer), 1.0)
  assert effect.message == messages.Retired((1,))


def test_a_resumed_machine_refuses_the_incarnations_of_before():
  machine = Syncer.resume(config_of({}), RUN, FINGERPRINTS, LEDGER)
  effects = machine.handle(_hello(5, (0, 0)), 1.0)
  assert 'not newer than 5' in effects[0].reason


def test_parameters_come_back_as_they_were(tmp_path):
  params = {'a/b': np.arange(6, dtype=np.float32).reshape(2, 3)}
  write_parameters(tmp_path / 'parameters', params)
  found = read_parameters(tmp_path / 'parameters')
  np.testing.assert_array_equal(found['a/b'], params['a/b'])


def test_missing_parameters_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='nothing-here'):
    read_parameters(tmp_path / 'nothing-here')
