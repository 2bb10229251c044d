# SPDX-License-Identifier: Apache-2.0
"""Serves the page of a run or a sweep and its figures over HTTP."""

import json
import pathlib
import threading
import time

from diloco.metrics import status
from diloco.monitoring import monitor
from diloco.monitoring.monitor import HTML, JSON, PageServer, check_host
from diloco.pages import page
from diloco.pages.parts import ReportPage
from diloco.watch.folders import FollowedFolders

EVERY_S = 1.5  # How often a page asks.
FRESH_S = 1.0  # A page that is younger is given again.


class WatchServer(PageServer):
  """Answers /, /data.json, /status and /metrics.

  Nothing is read unless a page asks, and then at most every `FRESH_S`.

  Args:
    folder: of the run or the sweep.
    host: where it listens; see `check_host`.
    port: 0 takes a free one.
    insecure: any name of this host may be asked for.

  Raises:
    NoReport: the folder holds neither.
    ValueError: other machines could read the run.
    OSError: it can't listen there.
  """

  def __init__(
    self, folder: pathlib.Path, host: str, port: int, insecure: bool = False
  ):
    check_host(host, insecure, f'--host={host}', '--insecure')
    self._followed = FollowedFolders([folder])
    self._reading = threading.Lock()
    self._page: ReportPage | None = None
    self._made_s = -FRESH_S
    super().__init__(host, port, self._answer, insecure)

  def page(self) -> ReportPage:
    """Returns the page, at most `FRESH_S` old."""
    with self._reading:
      if self._page is None or time.monotonic() - self._made_s >= FRESH_S:
        self._page = self._followed.page()
        self._made_s = time.monotonic()
      return self._page

  def _answer(self, path: str) -> tuple[str, str] | None:
    match path:
      case '/':
        return HTML, page.render(self.page(), EVERY_S)
      case '/data.json':
        return JSON, page.as_json(self.page())
      case '/status':
        self.page()
        run_status = self._followed.status
        return JSON, json.dumps(run_status and status.as_json(run_status))
      case '/metrics':
        self.page()
        text = monitor.text(self._followed.status)
        return monitor.CONTENT_TYPE, text
    return None
