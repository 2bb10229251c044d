# SPDX-License-Identifier: Apache-2.0
"""A process that can't do its part says why in one line, and exits."""

import socket

import pytest

from tests.data import made_files
from tests.processes.processes import EXIT_CONFIG, Processes
from tests.transport import credentials

pytestmark = pytest.mark.beside

NO_DEVICES = {'JAX_PLATFORMS': 'none'}  # A process that touches a device fails.
MISSING = '/no/such/text.txt'


def _error(processes: Processes, running, code: int) -> str:
  """The one line that the process ends with, and no traceback."""
  assert processes.exit_code(running) == code, running.output
  assert 'Traceback' not in running.output
  assert len(running.errors) == 1, running.output
  return running.errors[0]


def test_port_in_use(tmp_path):
  """Issue: a port in use is a clear error that names the address."""
  with socket.create_server(('127.0.0.1', 0)) as taken:
    address = f'127.0.0.1:{taken.getsockname()[1]}'
    with Processes(tmp_path) as processes:
      syncer = processes.start('syncer', 'diloco.syncer', f'--bind={address}')
      error = _error(processes, syncer, code=1)
  assert error.startswith(f'error: --bind={address}: ')
  assert 'in use' in error


@pytest.mark.parametrize(
  'address, reason, code',
  [
    ('no-such-host.invalid:7777', "'no-such-host.invalid' does not resolve", 1),
    ('127.0.0.1', 'host:port', EXIT_CONFIG),
  ],
)
def test_address_of_no_use(tmp_path, address, reason, code):
  """Issue: a host name that does not resolve is a clear error at once."""
  with Processes(tmp_path) as processes:
    learner = processes.start(
      'learner', 'diloco.learner', '--learner=0', f'--syncer={address}'
    )
    error = _error(processes, learner, code)
  assert error.startswith(f'error: --syncer={address}: ')
  assert reason in error


def test_nobody_listens(tmp_path):
  """A learner looks for the syncer as long as it was told, then says so."""
  with socket.socket() as bound:  # It listens nowhere, and keeps the port.
    bound.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{bound.getsockname()[1]}'
    with Processes(tmp_path, 'transport.connect_s=1.0') as processes:
      learner = processes.start(
        'learner', 'diloco.learner', '--learner=0', f'--syncer={address}'
      )
      error = _error(processes, learner, code=1)
  assert f'no syncer at {address} within 1.0 s' in error


@pytest.mark.parametrize(
  'module, flags',
  [
    ('diloco.syncer', ()),
    ('diloco.learner', ('--learner=0', '--syncer=127.0.0.1:1')),
  ],
  ids=['syncer', 'learner'],
)
def test_text_is_missing(tmp_path, module, flags):
  """Issue: a missing text is a clear error, before a device is touched."""
  overrides = ('data.source=text', f'data.path={MISSING}')
  with Processes(tmp_path, *overrides) as processes:
    process = processes.start('it', module, *flags, environment=NO_DEVICES)
    assert MISSING in _error(processes, process, EXIT_CONFIG)


@pytest.mark.parametrize(
  'module, flags',
  [
    ('diloco.syncer', ()),
    ('diloco.learner', ('--learner=0', '--syncer=127.0.0.1:1')),
  ],
  ids=['syncer', 'learner'],
)
@pytest.mark.parametrize(
  'length, reason',
  [
    (700, 'held-out tokens hold no window of'),
    (5000, 'one batch of each of 64 learners needs 256'),
  ],
)
def test_text_is_too_short(tmp_path, module, flags, length, reason):
  """The evaluation at the end needs text, too: it is said at the start."""
  (tmp_path / 'text.txt').write_text('x' * length)
  overrides = (
    'data.source=text',
    f'data.path={tmp_path / "text.txt"}',
    'data.seq_len=32',
    'data.batch=4',
    f'data.shards={4 if length < 1000 else 64}',
  )
  with Processes(tmp_path, *overrides) as processes:
    process = processes.start('it', module, *flags, environment=NO_DEVICES)
    assert reason in _error(processes, process, EXIT_CONFIG)


def test_a_tokenizer_of_more_tokens_than_the_model(tmp_path):
  """Issue: it is said before a device is touched, or anything is indexed."""
  texts = made_files.texts()
  name = made_files.tokenizers_json(tmp_path / 'tokenizer.json', texts)
  overrides = (
    'data.source=parquet',
    f'data.path={made_files.parquet(tmp_path / "parquet", texts)}',
    f'data.tokenizer={name}',
    f'data.index_path={tmp_path / "indices"}',
    f'model.vocab={made_files.VOCAB - 1}',
  )
  with Processes(tmp_path, *overrides) as processes:
    learner = processes.start(
      'learner',
      'diloco.learner',
      '--learner=0',
      '--syncer=127.0.0.1:1',
      environment=NO_DEVICES,
    )
    error = _error(processes, learner, EXIT_CONFIG)
  assert error == (
    f"error: model.vocab=299: data.tokenizer='{name}' has 300 tokens, the "
    'model must know them all'
  )
  assert not (tmp_path / 'indices').exists()


def test_learner_beyond_the_shards(tmp_path):
  """A learner without a shard of the data would train on another's."""
  with Processes(tmp_path, 'data.shards=2') as processes:
    learner = processes.start(
      'learner', 'diloco.learner', '--learner=2', '--syncer=127.0.0.1:1'
    )
    error = _error(processes, learner, EXIT_CONFIG)
  assert error == 'error: learner=2: must be in 0 … 1, there are data.shards=2'


def test_mesh_beyond_the_devices(tmp_path):
  """Issue: a mesh that does not fit the devices fails at once."""
  with Processes(tmp_path, 'mesh.fsdp=2') as processes:
    learner = processes.start(
      'learner', 'diloco.learner', '--learner=0', '--syncer=127.0.0.1:1'
    )
    error = _error(processes, learner, EXIT_CONFIG)
  assert 'mesh.fsdp=2' in error
  assert 'this learner has 1' in error


@pytest.mark.parametrize(
  'module, flags',
  [
    ('diloco.syncer', ()),
    ('diloco.learner', ('--learner=0', '--syncer=127.0.0.1:1')),
  ],
  ids=['syncer', 'learner'],
)
def test_a_secret_that_everybody_can_read(tmp_path, module, flags):
  """Issue: it is named, in one line, before a device is touched."""
  token = tmp_path / 'token'
  token.write_text('0123456789abcdef')
  token.chmod(0o644)
  with Processes(tmp_path) as processes:
    process = processes.start(
      'it', module, *flags, f'--token_file={token}', environment=NO_DEVICES
    )
    error = _error(processes, process, EXIT_CONFIG)
  assert error.startswith(f'error: --token_file={token}: every user')


def test_who_would_be_refused_is_told_before_a_device_is_touched(tmp_path):
  """A learner that is not let in says so, and is not started again."""
  ours, strangers = (
    f'--token_file={credentials.copied(tmp_path, name) / "run.token"}'
    for name in ('ours', 'strangers')
  )
  with Processes(tmp_path) as processes:
    processes.syncer(ours)
    started = [
      processes.learner(0, flags=(strangers,), environment=NO_DEVICES),
      processes.learner(
        1, 'inner.lr=0.5', flags=(ours,), environment=NO_DEVICES
      ),
    ]
    token, key = (
      _error(processes, learner, EXIT_CONFIG) for learner in started
    )
  assert token.startswith('error: --token_file: ')
  assert 'UNAUTHENTICATED: the token is missing or wrong' in token
  assert key == (
    'error: the syncer refused: another inner.lr: 0.5, the run has 0.003'
  )


def test_nobody_listens_to_strangers_unasked(tmp_path):
  """Only loopback is safe without authentication."""
  with Processes(tmp_path) as processes:
    syncer = processes.start('syncer', 'diloco.syncer', '--bind=0.0.0.0:0')
    error = _error(processes, syncer, EXIT_CONFIG)
  assert '--bind=0.0.0.0' in error
  assert '--insecure' in error
