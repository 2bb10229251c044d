# SPDX-License-Identifier: Apache-2.0
"""The page of a run, over HTTP and as a file."""

import contextlib
import dataclasses
import gzip
import http.client
import json
import socket
import threading

import pytest

from diloco.metrics import status
from diloco.monitoring import monitor
from diloco.watch import watch_server
from diloco.watch.watch_server import WatchServer
from tests.commands import python, refused
from tests.prediction import recorded
from tests.waiting import until
from tests.watch.test_followed_run import told

pytestmark = pytest.mark.beside
WATCH = '-m', 'diloco.watch'


@pytest.fixture(scope='module', name='workdir')
def fixture_workdir(tmp_path_factory):
  workdir = recorded.write(tmp_path_factory.mktemp('watch') / 'run', 10.0, {})
  status.write_status(workdir.status, told(10, 5.0))
  return workdir


@pytest.fixture(scope='module', name='server')
def fixture_server(workdir):
  with WatchServer(workdir.root, '127.0.0.1', 0) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def ask(server, path, method='GET', **headers):
  host, port = server.server_address
  connection = http.client.HTTPConnection(host, port, timeout=240)
  names = {key.replace('_', '-'): value for key, value in headers.items()}
  connection.request(method, path, headers=names)
  answer = connection.getresponse()
  body = answer.read()
  connection.close()
  return answer, body


def test_the_page_loads_nothing_from_elsewhere(server):
  answer, body = ask(server, '/')
  text = body.decode()
  assert answer.status == 200
  assert "default-src 'none'" in answer.headers['Content-Security-Policy']
  assert 'tests-tiny' in text and '{{' not in text
  # Names of an SVG's elements are no address that is asked.
  assert text.replace('http://www.w3.org/2000/svg', '').count('://') == 0
  assert ' src=' not in text and '@import' not in text


def test_the_state_is_asked_for_and_not_sent_twice(server, workdir):
  answer, body = ask(server, '/data.json')
  assert json.loads(body)['where'] == str(workdir.root.resolve())
  tag = answer.headers['ETag']
  again, nothing = ask(server, '/data.json', If_None_Match=tag)
  assert (again.status, nothing) == (304, b'')


def test_a_browser_gets_it_packed(server):
  answer, body = ask(server, '/data.json', Accept_Encoding='gzip')
  assert answer.headers['Content-Encoding'] == 'gzip'
  assert json.loads(gzip.decompress(body))['name'] == 'tests-tiny'


def test_what_a_run_writes_is_seen_by_the_next_question(
  server, workdir, monkeypatch
):
  monkeypatch.setattr(watch_server, 'FRESH_S', 0.0)
  _, before = ask(server, '/data.json')
  recorded.append(workdir.tape, recorded.line(9.0, 'outlier', reason='far'))
  _, after = ask(server, '/data.json')
  assert b'outlier' not in before
  assert b'outlier' in after


def test_the_status_is_served(server):
  _, body = ask(server, '/status')
  assert json.loads(body)['step'] == 10


def test_metrics_are_in_the_text_format(server):
  answer, body = ask(server, '/metrics')
  lines = body.decode().splitlines()
  assert answer.headers['Content-Type'].startswith('text/plain')
  assert 'diloco_goodput_ratio{run="tests-tiny"} 0.9' in lines
  assert '# TYPE diloco_refused_total counter' in lines
  assert (
    'diloco_learner_participation_ratio{learner="0",run="tests-tiny"} 0.75'
    in lines
  )


def test_labels_are_escaped_and_unknown_values_left_out():
  assert monitor.text(None) == ''
  odd = dataclasses.replace(told(1, 0.0), run='a"b\\c\n', age_steps=None)
  text = monitor.text(odd)
  assert 'run="a\\"b\\\\c\\n"' in text
  assert 'diloco_offer_age_steps{' not in text


@pytest.mark.parametrize('path', ['/x', '/data.json/..', '/../config.json'])
def test_nothing_else_is_served(server, path):
  assert ask(server, path)[0].status == 404


def test_a_head_has_no_body(server):
  answer, body = ask(server, '/', method='HEAD')
  assert (answer.status, body) == (200, b'')


def test_nothing_can_be_sent(server):
  assert ask(server, '/', method='POST')[0].status == 501


@pytest.mark.parametrize(
  ('name', 'code'),
  [
    ('localhost:1', 200), ('127.0.0.1:99', 200), ('[::1]:80', 200),
    ('evil.example', 403), ('10.0.0.1', 403), ('[', 403),
  ],
)  # fmt: skip
def test_a_foreign_name_of_this_address_is_refused(server, name, code):
  """Otherwise any web site could read the run through its reader's browser."""
  assert ask(server, '/data.json', Host=name)[0].status == code


def is_closed(stranger: socket.socket) -> bool:
  """Waits until the server has closed a connection, and said nothing."""
  stranger.settimeout(60.0)
  with contextlib.suppress(ConnectionError):
    return stranger.recv(1) == b''
  return True


def test_strangers_that_ask_for_nothing_keep_no_descriptors(
  server, monkeypatch
):
  monkeypatch.setattr(monitor, 'REQUEST_S', 0.5)
  monkeypatch.setattr(monitor._Handler, 'timeout', 600.0)  # Of a read.
  with contextlib.ExitStack() as idle:
    many = range(monitor.CONNECTIONS_MAX + 20)
    address = server.server_address
    strangers = [
      idle.enter_context(socket.create_connection(address)) for _ in many
    ]
    assert all(map(is_closed, strangers))
  assert ask(server, '/status')[0].status == 200


def test_more_strangers_than_are_served_at_a_time_are_sent_away(
  server, monkeypatch
):
  until(lambda: not server._deadlines, 60.0, 'earlier ones have gone')
  monkeypatch.setattr(monitor, 'CONNECTIONS_MAX', 3)
  monkeypatch.setattr(monitor, 'REQUEST_S', 600.0)  # Nobody's time is over.
  with contextlib.ExitStack() as idle:
    address = server.server_address
    strangers = [
      idle.enter_context(socket.create_connection(address)) for _ in range(5)
    ]
    assert all(map(is_closed, strangers[3:]))
    assert len(server._deadlines) == 3


def test_a_header_that_drips_is_given_up(server, monkeypatch):
  monkeypatch.setattr(monitor, 'REQUEST_S', 0.5)
  with socket.create_connection(server.server_address) as stranger:
    stranger.sendall(b'GET / HTTP/1.1\r\nHost: localhost\r\n')
    assert is_closed(stranger)


def test_a_connection_is_closed_after_its_answer(server):
  with socket.create_connection(server.server_address) as reader:
    reader.sendall(b'GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n')
    reader.settimeout(60.0)
    got = b''
    while part := reader.recv(1 << 16):
      got += part
  assert got.startswith(b'HTTP/1.1 200')
  assert b'Connection: close' in got


@pytest.mark.parametrize('host', ['0.0.0.0', '::'])
def test_beyond_loopback_it_refuses_unless_told_otherwise(workdir, host):
  with pytest.raises(ValueError, match=f'--host={host}.*--insecure'):
    WatchServer(workdir.root, host, 0)
  monitor.check_host(host, True, '', '')
  for mine in ('127.0.0.1', '::1', 'localhost'):
    monitor.check_host(mine, False, '', '')


def test_it_writes_one_file(workdir, tmp_path):
  path = tmp_path / 'page.html'
  done = python(*WATCH, workdir.root, f'--write={path}')
  assert done.returncode == 0, done.stderr
  assert 'data-every="0"' in path.read_text()
  assert f'page: {path}' in done.stderr


@pytest.mark.parametrize(
  ('argv', 'said'),
  [
    ([], 'RUN: is missing'),
    (['nowhere'], 'nowhere: is no folder'),
    (['RUN', '--host=0.0.0.0'], '--host=0.0.0.0: other machines'),
    (['RUN', '--write=/proc/x.html'], '--write=/proc/x.html'),
  ],
)
def test_what_can_not_be_is_refused(workdir, argv, said):
  words = (workdir.root if x == 'RUN' else x for x in argv)
  assert said in ' '.join(refused(*WATCH, *words))


@pytest.mark.parametrize(
  ('error', 'said'), [(ConnectionResetError(), False), (ValueError(), True)]
)
def test_a_reader_that_goes_away_is_no_error(server, capsys, error, said):
  try:
    raise error
  except type(error):
    server.handle_error(None, ('127.0.0.1', 1))
  assert ('Traceback' in capsys.readouterr().err) == said
