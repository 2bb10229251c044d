# SPDX-License-Identifier: Apache-2.0
"""The state of a run in the text format of Prometheus."""

from collections.abc import Iterator, Mapping

from diloco.metrics.status import (
  LEARNER_METRICS,
  RUN_METRICS,
  LearnerStatus,
  Metric,
  RunStatus,
)


def text(status: RunStatus | None) -> str:
  """Returns all samples; none before the first status."""
  return ''.join(f'{line}\n' for line in _lines(status)) if status else ''


def _lines(status: RunStatus) -> Iterator[str]:
  run = f'run="{_escaped(status.run)}"'
  for name, metric in RUN_METRICS.items():
    yield from _family(name, metric, {run: status})
  learners = {f'{run},learner="{x.learner}"': x for x in status.learners}
  for name, metric in LEARNER_METRICS.items():
    yield from _family(name, metric, learners)


def _family(
  name: str, metric: Metric, labelled: Mapping[str, RunStatus | LearnerStatus]
) -> Iterator[str]:
  """Yields one metric; values that are not known are left out."""
  samples = {labels: metric.value(x) for labels, x in labelled.items()}
  known = {labels: x for labels, x in samples.items() if x is not None}
  if known:
    yield f'# HELP diloco_{name} {metric.meaning}'
    yield f'# TYPE diloco_{name} {metric.kind}'
    yield from (f'diloco_{name}{{{labels}}} {x}' for labels, x in known.items())


def _escaped(label: str) -> str:
  escaped = label.replace('\\', '\\\\').replace('"', '\\"')
  return escaped.replace('\n', '\\n')
