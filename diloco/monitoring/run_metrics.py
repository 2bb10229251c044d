# SPDX-License-Identifier: Apache-2.0
"""The state of a run as metrics of Prometheus."""

from collections.abc import Iterator, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from diloco.metrics import figures
from diloco.metrics.figures import Figure
from diloco.metrics.status import LearnerStatus, RunStatus

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_FAMILIES = {'gauge': GaugeMetricFamily, 'counter': CounterMetricFamily}


def text(status: RunStatus | None) -> str:
  """Returns all samples in the text format; none before the first status."""
  registry = prometheus_client.CollectorRegistry()
  registry.register(_Collector(status))
  return prometheus_client.generate_latest(registry).decode()


def families(
  status: RunStatus,
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
  """Yields each metric; values that are not known are left out."""
  for figure in figures.RUN:
    yield from _family(figure, ('run',), {(status.run,): status})
  learners = {(status.run, str(x.learner)): x for x in status.learners}
  for figure in figures.LEARNER:
    yield from _family(figure, ('run', 'learner'), learners)


class _Collector:
  def __init__(self, status: RunStatus | None):
    self._status = status

  def collect(self):
    return families(self._status) if self._status else ()


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
