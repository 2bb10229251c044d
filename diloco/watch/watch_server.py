# SPDX-License-Identifier: Apache-2.0
"""Serves the page of a run, and its state, over HTTP; reads only."""

import json
import pathlib
import threading
import time

from diloco.monitoring import run_metrics
from diloco.monitoring.http_pages import HTML, JSON, PageServer, check_host
from diloco.watch import live_page
from diloco.watch.followed_run import FollowedRun

EVERY_S = 1.5  # How often a page asks.
FRESH_S = 1.0  # A state that is younger is given again.


class WatchServer(PageServer):
  """Answers /, /data.json, /status and /metrics.

  Nothing is read unless a page asks, and then at most every `FRESH_S`.

  Args:
    folder: of the run.
    host: where it listens; see `check_host`.
    port: 0 takes a free one.
    insecure: any name of this host may be asked for.

  Raises:
    NoReport: the folder holds no run.
    ValueError: other machines could read the run.
    OSError: it can't listen there.
  """

  def __init__(
    self, folder: pathlib.Path, host: str, port: int, insecure: bool = False
  ):
    check_host(host, insecure, f'--host={host}', '--insecure')
    self._run = FollowedRun(folder)
    self._reading = threading.Lock()
    self._state: dict = {}
    self._read_s = -FRESH_S
    super().__init__(host, port, insecure)

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
        return run_metrics.CONTENT_TYPE, run_metrics.text(self._run.status)
    return None
