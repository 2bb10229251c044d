# SPDX-License-Identifier: Apache-2.0
"""Serves `/metrics` and `/status` of one process, beside its work.

The HTTP server, which is that of the page, too, answers and takes nothing.
"""

import contextlib
import gzip
import http.server
import ipaddress
import json
import math
import os
import re
import socket
import sys
import threading
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from diloco.metrics import figures, names, status
from diloco.metrics.figures import Figure
from diloco.metrics.status import LearnerStatus, RunStatus
from diloco.transport.sockets import is_loopback

Answer = tuple[str, str]  # Its type, and its text.
CONNECTIONS_MAX = 32  # At a time; more are closed at once.
REQUEST_S = 5.0  # From the connection to the end of the request's header.
ANSWER_S = 60.0  # An answer that is not taken by then is given up.
HTML, JSON = 'text/html; charset=utf-8', 'application/json'
# A page has its script and its colours in it, and asks its own server only.
POLICY = (
  "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
  "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'"
)
LABELS = ('run', 'process')
# The time has a metric of its own; an incarnation is a name, in /status alone.
NO_METRICS = (names.TIME, names.INCARNATION)
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_FAMILIES = {'gauge': GaugeMetricFamily, 'counter': CounterMetricFamily}


def check_host(host: str, vouched: bool, flag: str, vouch: str) -> None:
  """Refuses an address at which other machines could read the run.

  Args:
    vouched: whether the operator vouches for those that reach it.
    flag: the flag that names the host, with its value.
    vouch: the flag that vouches.

  Raises:
    ValueError: it is not of loopback, and the operator did not vouch.
    HostUnknown: the name does not resolve.
  """
  if not vouched and not is_loopback(host):
    raise ValueError(
      f'{flag}: other machines could read the run without proving who '
      'they are; use an ssh tunnel to 127.0.0.1, or on a private network '
      f'{vouch}'
    )


class PageServer(http.server.ThreadingHTTPServer):
  """Serves what it is given, and closes the connection after it.

  Connections that ask for nothing are closed soon, and few are open at a time:
  a process that is watched needs its descriptors for its work.

  Args:
    host: where it listens; see `check_host`.
    port: 0 takes a free one.
    answer: returns (type, text) of a path; None: there is no such page.
    any_name: any name of this host may be asked for, not only of loopback.

  Raises:
    OSError: it can't listen there.
  """

  daemon_threads = True

  def __init__(
    self,
    host: str,
    port: int,
    answer: Callable[[str], Answer | None],
    any_name: bool = False,
  ):
    self.answer = answer
    self.address_family = socket.AF_INET6 if ':' in host else socket.AF_INET
    self._any_name = any_name
    self._lock = threading.Lock()
    self._deadlines: dict[socket.socket, float] = {}  # Of open connections.
    super().__init__((host, port), _Handler)

  @property
  def url(self) -> str:
    host, port = self.server_address[:2]
    return (
      f'http://[{host}]:{port}/' if ':' in host else f'http://{host}:{port}/'
    )

  def verify_request(self, request, client_address) -> bool:
    """Returns False if too many connections are open."""
    with self._lock:
      if len(self._deadlines) >= CONNECTIONS_MAX:
        return False
      self._deadlines[request] = time.monotonic() + REQUEST_S
    return True

  def note_asked(self, request: socket.socket):
    """Notes that a request is complete: from now on it is for us to answer."""
    with self._lock:
      self._deadlines[request] = time.monotonic() + ANSWER_S

  def service_actions(self):
    """Ends connections whose time is over; called about twice a second."""
    with self._lock:
      now_s = time.monotonic()
      late = [s for s, until_s in self._deadlines.items() if until_s < now_s]
      for request in late:
        del self._deadlines[request]
    for request in late:
      with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)  # Its thread then closes it.

  def shutdown_request(self, request):
    with self._lock:
      self._deadlines.pop(request, None)
    super().shutdown_request(request)

  def handle_error(self, request, client_address):
    """Prints an error, but not that a reader closed its connection."""
    if not isinstance(sys.exception(), ConnectionError):
      super().handle_error(request, client_address)

  def knows(self, host: str) -> bool:
    """Returns False for a name that a foreign page gave to this address."""
    if self._any_name:
      return True
    try:
      name = urllib.parse.urlsplit(f'//{host}').hostname or ''
    except ValueError:  # Such as '['.
      return False
    with contextlib.suppress(ValueError):
      return ipaddress.ip_address(name).is_loopback
    return name == 'localhost'


class _Handler(http.server.BaseHTTPRequestHandler):
  server: PageServer
  protocol_version = 'HTTP/1.1'
  timeout = ANSWER_S

  def do_GET(self):
    self.server.note_asked(self.connection)
    self.close_connection = True
    if not self.server.knows(self.headers.get('Host', '')):
      self.send_error(403, 'Ask for localhost or 127.0.0.1')
      return
    answer = self.server.answer(urllib.parse.urlsplit(self.path).path)
    if answer is None:
      self.send_error(404)
      return
    kind, text = answer
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
    self.send_header('Connection', 'close')
    self.send_header('Cache-Control', 'no-store')
    self.send_header('Content-Security-Policy', POLICY)
    self.send_header('X-Content-Type-Options', 'nosniff')
    self.end_headers()

  def log_message(self, format, *args):  # A line per request would be noise.
    pass


# What is served ---------------------------------------------------------------


class Monitor:
  """Keeps the last that a process has told, and serves it if asked to.

  It is a `Writer` of scalars. A process that tells something never waits: text
  is made in the threads that answer.

  Args:
    run: name of the run.
    process: name of the process, such as 'learner-0'.
  """

  def __init__(self, run: str, process: str):
    self._run = run
    self._process = process
    self._began_s = time.time()
    self._last: tuple[int | None, Mapping[str, float]] = None, {}
    self._status: RunStatus | None = None
    self._server: PageServer | None = None

  def serve(self, host: str, port: int, any_name: bool = False) -> str:
    """Serves in threads of its own until `close`; returns the URL.

    Args:
      port: 0 takes a free one.
      any_name: any name of this host may be asked for, not only of loopback.

    Raises:
      OSError: it can't listen there.
    """
    self._server = PageServer(host, port, self._answer, any_name)
    threading.Thread(
      target=self._server.serve_forever, name='monitor', daemon=True
    ).start()
    return self._server.url

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Replaces what was told before."""
    self._last = int(step), dict(scalars)

  def flush(self) -> None:
    """Does nothing: all that was told can be read."""

  def show(self, status: RunStatus) -> None:
    """Replaces the state of the run, which the syncer's process serves."""
    self._status = status

  def close(self) -> None:
    """Stops serving; may be called again."""
    if self._server is not None:
      self._server.shutdown()
      self._server.server_close()
      self._server = None

  def metrics(self, process: bool = True) -> str:
    """Returns the text of `/metrics`.

    Args:
      process: whether this process itself is measured, too.
    """
    registry = prometheus_client.CollectorRegistry()
    registry.register(self)
    if process:
      prometheus_client.ProcessCollector(registry=registry)
    return prometheus_client.generate_latest(registry).decode()

  def status(self) -> dict:
    """Returns what `/status` has: of the syncer's process the run's status,
    of another its last scalars.
    """
    if self._status is not None:
      return status.as_json(self._status)
    step, scalars = self._last
    return {
      'run': self._run,
      'process': self._process,
      'pid': os.getpid(),
      'began_s': self._began_s,
      'step': step,
      'scalars': {
        name: x if math.isfinite(x) else None for name, x in scalars.items()
      },
    }

  def _answer(self, path: str) -> Answer | None:
    match path:
      case '/metrics':
        return CONTENT_TYPE, self.metrics()
      case '/status':
        return JSON, json.dumps(self.status(), allow_nan=False)
    return None

  def collect(self) -> Iterator[GaugeMetricFamily]:
    """Yields the metrics of the process, as `prometheus_client` asks."""
    step, scalars = self._last
    if step is not None:
      yield self._gauge('step', 'Step that the scalars are of.', step)
    if names.TIME in scalars:
      meaning = 'When the scalars were told.'
      yield self._gauge('scalars_time_seconds', meaning, scalars[names.TIME])
    for name, x in scalars.items():
      if name not in NO_METRICS:
        plain = re.sub(r'\W', '_', name, flags=re.ASCII)
        yield self._gauge(plain, f'Scalar {name}.', x)
    if self._status is not None:
      yield from families(self._status)

  def _gauge(self, name: str, meaning: str, x: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f'diloco_{name}', meaning, labels=LABELS)
    gauge.add_metric((self._run, self._process), x)
    return gauge


def text(status: RunStatus | None) -> str:
  """Returns all samples in the text format; none before the first status."""
  monitor = Monitor('', '')
  if status is not None:
    monitor.show(status)
  return monitor.metrics(process=False)


def families(
  status: RunStatus,
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
  """Yields each metric; values that are not known are left out."""
  for figure in figures.RUN:
    yield from _family(figure, ('run',), {(status.run,): status})
  learners = {(status.run, str(x.learner)): x for x in status.learners}
  for figure in figures.LEARNER:
    yield from _family(figure, ('run', 'learner'), learners)


def _family(
  figure: Figure,
  labels: tuple[str, ...],
  labelled: Mapping[tuple[str, ...], RunStatus | LearnerStatus],
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
  samples = {each: figure.value(x) for each, x in labelled.items()}
  known = {each: x for each, x in samples.items() if x is not None}
  if known:
    family = _FAMILIES[figure.kind](
      f'diloco_{figure.sample}', figure.meaning, labels=labels
    )
    for each, x in known.items():
      family.add_metric(each, x)
    yield family
