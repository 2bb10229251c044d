# SPDX-License-Identifier: Apache-2.0
"""Serves `/metrics` and `/status` of one process, beside its work."""

import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from diloco.metrics import figures, names, status
from diloco.metrics.figures import Figure
from diloco.metrics.status import LearnerStatus, RunStatus
from diloco.monitoring.http_pages import JSON, PageServer

LABELS = ('run', 'process')
# The time has a metric of its own; an incarnation is a name, in /status alone.
NO_METRICS = (names.TIME, names.INCARNATION)
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_FAMILIES = {'gauge': GaugeMetricFamily, 'counter': CounterMetricFamily}


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
    self._told: tuple[int | None, Mapping[str, float]] = None, {}
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
    self._server = _Server(self, host, port, any_name)
    threading.Thread(
      target=self._server.serve_forever, name='monitor', daemon=True
    ).start()
    return self._server.url

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Replaces what was told before."""
    self._told = int(step), dict(scalars)

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
    step, scalars = self._told
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

  def collect(self) -> Iterator[GaugeMetricFamily]:
    """Yields the metrics of the process, as `prometheus_client` asks."""
    step, scalars = self._told
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
    found = GaugeMetricFamily(f'diloco_{name}', meaning, labels=LABELS)
    found.add_metric((self._run, self._process), x)
    return found


class _Server(PageServer):
  def __init__(self, monitor: Monitor, host: str, port: int, any_name: bool):
    self._monitor = monitor
    super().__init__(host, port, any_name)

  def answer(self, path: str) -> tuple[str, str] | None:
    match path:
      case '/metrics':
        return CONTENT_TYPE, self._monitor.metrics()
      case '/status':
        return JSON, json.dumps(self._monitor.status(), allow_nan=False)
    return None


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
    found = _FAMILIES[figure.kind](
      f'diloco_{figure.sample}', figure.meaning, labels=labels
    )
    for each, x in known.items():
      found.add_metric(each, x)
    yield found
