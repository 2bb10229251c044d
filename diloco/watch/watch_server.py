# SPDX-License-Identifier: Apache-2.0
"""Serves the page of a run, and its state, over HTTP; reads only."""

import contextlib
import gzip
import http.server
import ipaddress
import json
import pathlib
import socket
import sys
import threading
import time
import urllib.parse
import zlib

from diloco.transport.sockets import is_loopback
from diloco.watch import live_page, prometheus
from diloco.watch.followed_run import FollowedRun

EVERY_S = 1.5  # How often a page asks.
FRESH_S = 1.0  # A state that is younger is given again.
HTML, JSON = 'text/html; charset=utf-8', 'application/json'
PROMETHEUS = 'text/plain; version=0.0.4; charset=utf-8'
# The page has its script and its colours in it, and asks this server only.
POLICY = (
  "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
  "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'"
)


def check_host(host: str, insecure: bool) -> None:
  """Refuses an address at which other machines could read the run.

  Raises:
    ValueError: it is not of loopback, and the operator did not vouch.
    HostUnknown: the name does not resolve.
  """
  if not insecure and not is_loopback(host):
    raise ValueError(
      f'--host={host}: other machines could read the run without proving who '
      'they are; use an ssh tunnel to 127.0.0.1, or on a private network '
      '--insecure'
    )


class WatchServer(http.server.ThreadingHTTPServer):
  """Answers /, /data.json, /status and /metrics.

  Nothing is read unless a page asks, and then at most every `FRESH_S`.

  Args:
    folder: of the run.
    host: where it listens; see `check_host`.
    port: 0 takes a free one.
    insecure: any name of this host may be asked for.

  Raises:
    NoReport: the folder holds no run.
    OSError: it can't listen there.
  """

  daemon_threads = True

  def __init__(
    self, folder: pathlib.Path, host: str, port: int, insecure: bool = False
  ):
    check_host(host, insecure)
    self.address_family = socket.AF_INET6 if ':' in host else socket.AF_INET
    self._run = FollowedRun(folder)
    self._insecure = insecure
    self._reading = threading.Lock()
    self._state: dict = {}
    self._read_s = -FRESH_S
    super().__init__((host, port), _Handler)

  @property
  def url(self) -> str:
    host, port = self.server_address[:2]
    return (
      f'http://[{host}]:{port}/' if ':' in host else f'http://{host}:{port}/'
    )

  def state(self) -> dict:
    """Returns the state of the run, at most `FRESH_S` old."""
    with self._reading:
      if time.monotonic() - self._read_s >= FRESH_S:
        self._run.update()
        self._state = self._run.state()
        self._read_s = time.monotonic()
      return self._state

  def answer(self, path: str) -> tuple[str, str] | None:
    """Returns (type, text) of a path; None: there is no such page."""
    match path:
      case '/':
        return HTML, live_page.of(self.state(), EVERY_S)
      case '/data.json':
        return JSON, live_page.as_json(self.state())
      case '/status':
        return JSON, json.dumps(self.state()['status'])
      case '/metrics':
        self.state()
        return PROMETHEUS, prometheus.text(self._run.status)
    return None

  def handle_error(self, request, client_address):
    """Prints an error, but not that a reader closed its connection."""
    if not isinstance(sys.exception(), ConnectionError):
      super().handle_error(request, client_address)

  def knows(self, host: str) -> bool:
    """Returns False for a name that a foreign page gave to this address."""
    if self._insecure:
      return True
    name = urllib.parse.urlsplit(f'//{host}').hostname or ''
    with contextlib.suppress(ValueError):
      return ipaddress.ip_address(name).is_loopback
    return name == 'localhost'


class _Handler(http.server.BaseHTTPRequestHandler):
  server: WatchServer
  protocol_version = 'HTTP/1.1'
  timeout = 60.0  # Of a connection on which nothing comes.

  def do_GET(self):
    if not self.server.knows(self.headers.get('Host', '')):
      self.send_error(403, 'Ask for localhost or 127.0.0.1')
      return
    found = self.server.answer(urllib.parse.urlsplit(self.path).path)
    if found is None:
      self.send_error(404)
      return
    kind, text = found
    body = text.encode()
    tag = f'"{zlib.crc32(body):08x}"'
    if self.headers.get('If-None-Match') == tag:
      self._head(304, kind, tag)
      return
    coding = 'gzip' in self.headers.get('Accept-Encoding', '')
    if coding:
      body = gzip.compress(body, compresslevel=1, mtime=0)
    self._head(200, kind, tag, len(body), coding)
    if self.command != 'HEAD':
      self.wfile.write(body)

  do_HEAD = do_GET

  def _head(
    self, status: int, kind: str, tag: str, length: int = 0, coding=False
  ):
    self.send_response(status)
    self.send_header('Content-Type', kind)
    self.send_header('Content-Length', str(length))
    if coding:
      self.send_header('Content-Encoding', 'gzip')
    self.send_header('ETag', tag)
    self.send_header('Cache-Control', 'no-store')
    self.send_header('Content-Security-Policy', POLICY)
    self.send_header('X-Content-Type-Options', 'nosniff')
    self.end_headers()

  def log_message(self, format, *args):  # A line per request would be noise.
    pass
