# SPDX-License-Identifier: Apache-2.0
"""The state of a run as metrics of Prometheus."""

from collections.abc import Iterator, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from diloco.metrics.status import (
  LEARNER_METRICS,
  RUN_METRICS,
  LearnerStatus,
  Metric,
  RunStatus,
)

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
  for name, metric in RUN_METRICS.items():
    yield from _family(name, metric, ('run',), {(status.run,): status})
  learners = {(status.run, str(x.learner)): x for x in status.learners}
  for name, metric in LEARNER_METRICS.items():
    yield from _family(name, metric, ('run', 'learner'), learners)


class _Collector:
  def __init__(self, status: RunStatus | None):
    self._status = status

  def collect(self):
    return families(self._status) if self._status else ()


def _family(
  name: str,
  metric: Metric,
  labels: tuple[str, ...],
  labelled: Mapping[tuple[str, ...], RunStatus | LearnerStatus],
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
  samples = {each: metric.value(x) for each, x in labelled.items()}
  known = {each: x for each, x in samples.items() if x is not None}
  if known:
    found = _FAMILIES[metric.kind](
      f'diloco_{name}', metric.meaning, labels=labels
    )
    for each, x in known.items():
      found.add_metric(each, x)
    yield found
