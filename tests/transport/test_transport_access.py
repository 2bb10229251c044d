# SPDX-License-Identifier: Apache-2.0
"""TLS and tokens on both planes: admission, and errors about bad files."""

import contextlib
import pathlib
import queue
import zlib

import grpc
import numpy as np
import pytest

from diloco.protocol import messages
from diloco.transport import (
  auth,
  control_client,
  control_server,
  data_plane,
  planes,
)
from tests.transport import credentials

pytestmark = pytest.mark.beside

WAIT_S = 60.0
REFUSED_S = 2.0  # A handshake that fails is tried again until then.
DATA = np.arange(256, dtype=np.uint8)


@pytest.fixture(scope='module')
def ours(tmp_path_factory):
  return credentials.copied(tmp_path_factory.mktemp('access'), 'ours')


@pytest.fixture(scope='module')
def strangers(tmp_path_factory):
  return credentials.copied(tmp_path_factory.mktemp('access'), 'strangers')


@contextlib.contextmanager
def serving(shown: auth.Access):
  server = control_server.ControlServer(
    '127.0.0.1:0', lambda *_: None, lambda *_: None, access=shown
  )
  with contextlib.closing(server):
    yield server


def connect(address: str, shown: auth.Access, timeout_s: float = WAIT_S):
  client = control_client.ControlClient(
    address, lambda _: None, lambda _: None, access=shown
  )
  with contextlib.closing(client):
    client.connect(timeout_s)


# Admission --------------------------------------------------------------------


def test_access_mutual_tls_lets_a_member_in(ours):
  member = credentials.read(ours)
  with serving(member) as server:
    connect(server.address, member)


def test_access_a_certificate_of_another_name_is_not_the_syncer(ours):
  wary = credentials.read(ours, tls_name='another')
  with serving(wary) as server, pytest.raises(control_client.ConnectFailed):
    connect(server.address, wary, REFUSED_S)


def test_access_mutual_tls_keeps_out_who_has_no_certificate(ours):
  files = auth.AccessFiles(tls_ca=str(ours / 'ca.pem'))
  bare = auth.read(files, serves=False, connects=True)
  with serving(credentials.read(ours)) as server:
    with pytest.raises(control_client.ConnectFailed):
      connect(server.address, bare, REFUSED_S)
    assert server.ended() == {}


def test_access_mutual_tls_keeps_out_another_ca(ours, strangers):
  stranger = credentials.read(strangers, tls_ca=str(ours / 'ca.pem'))
  member = credentials.read(ours)
  with serving(member) as server, pytest.raises(control_client.ConnectFailed):
    connect(server.address, stranger, REFUSED_S)


def test_access_a_learner_does_not_talk_to_another_ca(ours, strangers):
  theirs, member = credentials.read(strangers), credentials.read(ours)
  with serving(theirs) as server, pytest.raises(control_client.ConnectFailed):
    connect(server.address, member, REFUSED_S)


def test_access_tls_keeps_out_plain_tcp(ours):
  member = credentials.read(ours)
  with serving(member) as server, pytest.raises(control_client.ConnectFailed):
    connect(server.address, auth.OPEN, REFUSED_S)


def test_access_a_token_is_asked_for_beside_the_certificate(ours):
  with_token = credentials.read(ours, token_file=str(ours / 'run.token'))
  with serving(with_token) as server:
    connect(server.address, with_token)
    with pytest.raises(control_client.NotAdmitted, match='token'):
      connect(server.address, credentials.read(ours))
    assert server.ended()['token'] == 1


def test_access_a_server_without_ca_takes_any_client_with_the_token(ours):
  token_file = str(ours / 'run.token')
  server_files = credentials.tls_files(ours, tls_ca=None, token_file=token_file)
  client_files = auth.AccessFiles(
    tls_ca=str(ours / 'ca.pem'), token_file=token_file
  )
  shown = auth.read(server_files, serves=True, connects=False)
  with serving(shown) as server:
    connect(
      server.address, auth.read(client_files, serves=False, connects=True)
    )


# The data plane --------------------------------------------------------------


@pytest.mark.parametrize('token', [None, 'run.token'], ids=['tls', 'and token'])
def test_access_the_data_plane_carries_bytes(ours, token):
  token_file = token and str(ours / token)
  member = credentials.read(ours, token_file=token_file)
  np.testing.assert_array_equal(pull(member, member, WAIT_S), DATA)


def test_access_the_data_plane_keeps_out_plain_tcp(ours):
  with pytest.raises(data_plane.TransferFailed):
    pull(credentials.read(ours), auth.OPEN)


def test_access_the_data_plane_keeps_out_another_ca(ours, strangers):
  stranger = credentials.read(strangers, tls_ca=str(ours / 'ca.pem'))
  with pytest.raises(data_plane.TransferFailed):
    pull(credentials.read(ours), stranger)


def test_access_the_data_plane_asks_for_the_token():
  """The token is required even with the address of the publisher."""
  member = auth.Access(token='of the run')
  with pytest.raises(data_plane.PeerLost, match='token is missing or wrong'):
    pull(member, auth.OPEN, WAIT_S)


def pull(
  theirs: auth.Access, ours: auth.Access, timeout_s: float = REFUSED_S
) -> np.ndarray:
  with (
    contextlib.closing(planes.make_plane('grpc', '127.0.0.1', theirs)) as there,
    contextlib.closing(planes.make_plane('grpc', '127.0.0.1', ours)) as here,
  ):
    publisher = there.publisher('us')
    publisher.offer(1, DATA)
    payload = messages.Payload(1, 'raw', DATA.nbytes, zlib.crc32(DATA))
    return here.fetcher(publisher.address).pull(payload, timeout_s)


def test_access_the_data_plane_waits_for_no_request():
  """A call that never sends one must not hold a thread of the server."""
  with contextlib.closing(planes.make_plane('grpc', '127.0.0.1')) as plane:
    endpoint = plane.publisher('us').address.split('/')[2]
    with grpc.insecure_channel(endpoint) as channel:
      call = channel.stream_stream('/diloco.DataPlane/Pull')
      silent = queue.SimpleQueue()
      with pytest.raises(grpc.RpcError) as caught:
        next(call(iter(silent.get, b''), timeout=WAIT_S))
      silent.put(b'')
      assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# Files -----------------------------------------------------------------------


def chmod(mode):
  return lambda path: path.chmod(mode)


FLAGS = ('tls_ca', 'tls_cert', 'tls_key', 'token_file')


@pytest.mark.parametrize(
  ('flag', 'spoil', 'named'),
  [
    *((flag, pathlib.Path.unlink, 'No such file') for flag in FLAGS),
    *((flag, lambda p: p.write_text('\n'), 'is empty') for flag in FLAGS),
    ('tls_key', chmod(0o644), 'can read or change it (mode 0644)'),
    ('token_file', chmod(0o604), 'can read or change it (mode 0604)'),
    ('token_file', chmod(0o602), 'chmod 600'),
    ('tls_ca', lambda p: p.write_text('x'), 'no PEM certificate'),
    ('tls_cert', lambda p: p.write_text('x'), 'no PEM certificate'),
    ('tls_key', lambda p: p.write_text('x'), 'no PEM key'),
    ('token_file', lambda p: p.write_text('short'), 'has 5 characters'),
    ('token_file', lambda p: p.write_text('a b' * 9), 'no spaces'),
    ('token_file', lambda p: p.write_bytes(b'\xff' * 40), 'printable ASCII'),
    ('token_file', lambda p: p.write_bytes(b'x' * (2 << 20)), 'more than'),
  ],
)
def test_access_a_bad_file_is_named(tmp_path, flag, spoil, named):
  folder = credentials.copied(tmp_path)
  files = credentials.tls_files(folder, token_file=str(folder / 'run.token'))
  path = getattr(files, flag)
  spoil(pathlib.Path(path))
  with pytest.raises(auth.BadAccess) as caught:
    auth.read(files, serves=True, connects=True)
  assert str(caught.value).startswith(f'--{flag}={path}: ')
  assert named in str(caught.value)


def test_access_a_key_of_another_certificate_is_refused(ours, strangers):
  files = credentials.tls_files(ours, tls_key=str(strangers / 'run.key'))
  with pytest.raises(auth.BadAccess, match='not that of --tls_cert'):
    auth.read(files, serves=True, connects=True)


@pytest.mark.parametrize(
  ('given', 'serves', 'connects', 'named'),
  [
    (('tls_cert',), True, False, 'needs --tls_key'),
    (('tls_key',), True, False, 'needs --tls_cert'),
    (('tls_ca',), True, False, 'needs --tls_cert'),
    (('tls_cert', 'tls_key'), False, True, 'needs --tls_ca'),
    (('tls_name',), False, True, 'needs --tls_ca'),
  ],
)
def test_access_half_of_tls_is_refused(ours, given, serves, connects, named):
  whole = credentials.tls_files(ours, tls_name='x')
  files = auth.AccessFiles(**{flag: getattr(whole, flag) for flag in given})
  with pytest.raises(auth.BadAccess, match=named):
    auth.read(files, serves=serves, connects=connects)


def test_access_does_not_show_its_token():
  assert 'secret' not in repr(auth.Access(token='secret'))
