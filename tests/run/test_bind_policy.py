# SPDX-License-Identifier: Apache-2.0
"""A process listens on loopback, or where its peers are known or vouched."""

import dataclasses

import pytest

from diloco.run.bind_policy import check_group, group_secret, open_access
from diloco.transport.auth import Access, AccessFiles
from tests.transport import credentials

PUBLIC, LOCAL = '192.0.2.1', '127.0.0.1'


@dataclasses.dataclass(frozen=True)
class Transport:
  """The keys of the configuration that are looked at."""

  data_plane: str
  host: str


def opened(
  files=None, plane='grpc', host=LOCAL, bind=None, insecure=False, fenced=False
):
  files = dataclasses.asdict(files or AccessFiles())
  return open_access(files, Transport(plane, host), bind, insecure, fenced)


@pytest.fixture
def folder(tmp_path):
  return credentials.copied(tmp_path)


def given(folder, kind):
  """Files of one kind of access."""
  token = str(folder / 'run.token')
  match kind:
    case 'mtls':
      return credentials.tls_files(folder)
    case 'token':
      return AccessFiles(token_file=token)
    case 'tls':
      return credentials.tls_files(folder, tls_ca=None)
  raise AssertionError(kind)


@pytest.mark.parametrize('plane', ['grpc', 'jax_transfer'])
def test_exposure_loopback_needs_nothing(plane):
  assert not opened(plane=plane, bind=LOCAL).knows_peers
  assert not opened(plane=plane, bind=None).knows_peers


@pytest.mark.parametrize('kind', ['mtls', 'token'])
def test_exposure_who_knows_his_peers_may_listen(folder, kind):
  assert opened(given(folder, kind), host=PUBLIC, bind=PUBLIC).knows_peers


def test_exposure_encryption_alone_lets_everybody_in(folder):
  with pytest.raises(ValueError, match='without proving who they are'):
    opened(given(folder, 'tls'), plane='jax_transfer', bind=PUBLIC)


@pytest.mark.parametrize(
  ('host', 'bind', 'flag'),
  [
    (LOCAL, PUBLIC, '--bind=192.0.2.1'),
    (LOCAL, '0.0.0.0', '--bind=0.0.0.0'),
    (PUBLIC, None, '--config.transport.host=192.0.2.1'),
  ],
  ids=['syncer', 'everywhere', 'learner'],
)
def test_exposure_strangers_are_refused_unless_vouched_for(host, bind, flag):
  with pytest.raises(ValueError, match='--insecure') as caught:
    opened(host=host, bind=bind)
  assert str(caught.value).startswith(f'{flag}: ')
  opened(host=host, bind=bind, insecure=True)


@pytest.mark.parametrize('bind', [PUBLIC, None], ids=['syncer', 'learner'])
def test_exposure_transfer_ports_need_a_fence_of_their_own(folder, bind):
  files = given(folder, 'mtls')
  where = {'plane': 'jax_transfer', 'host': PUBLIC, 'bind': bind}
  with pytest.raises(ValueError, match='--transfer_fenced'):
    opened(files, **where)
  assert opened(files, **where, fenced=True).server is not None or bind is None


def test_exposure_a_fence_does_not_open_the_control_plane():
  with pytest.raises(ValueError, match='--bind'):
    opened(plane='jax_transfer', host=PUBLIC, bind=PUBLIC, fenced=True)


def test_exposure_a_token_in_the_clear_is_warned_of(folder, caplog):
  opened(given(folder, 'token'), bind=PUBLIC)
  assert 'travels in the clear' in caplog.text


def checked(coordinator, host=LOCAL, secret=True, insecure=False, fenced=False):
  check_group(coordinator, Transport('grpc', host), secret, insecure, fenced)


@pytest.mark.parametrize('coordinator', ['127.0.0.1:9', 'localhost:9'])
def test_exposure_hosts_on_one_machine_need_nothing(coordinator):
  checked(coordinator, secret=False)
  checked(coordinator, host=PUBLIC, secret=False)


@pytest.mark.parametrize(
  'coordinator', [f'{PUBLIC}:9', '0.0.0.0:9', 'not-yet.invalid:9']
)
def test_exposure_hosts_elsewhere_need_a_secret_and_a_fence(coordinator):
  with pytest.raises(ValueError, match='--token_file') as caught:
    checked(coordinator, secret=False, fenced=True)
  assert str(caught.value).startswith(f'--coordinator={coordinator}: ')
  with pytest.raises(ValueError, match='--transfer_fenced'):
    checked(coordinator)
  checked(coordinator, fenced=True)
  checked(coordinator, secret=False, insecure=True)


def test_exposure_a_secret_is_made_of_all_that_is_known():
  one = group_secret(Access(token='t'), 's', 0)
  assert one == group_secret(Access(token='t'), 's', 0)
  others = {
    group_secret(Access(token='t'), 's', 1),
    group_secret(Access(token='t'), '', 0),
    group_secret(Access(), 's', 0),
  }
  assert len(others | {one}) == 4
