# SPDX-License-Identifier: Apache-2.0
"""Aggregates a timeline's lanes by pixel column, for any number of spans."""

import collections
from collections.abc import Sequence

import numpy as np

from diloco.pages.parts import SPAN_KINDS, Timeline

# Steps alternate between two tints, so that one sees where one ends.
TINTS = ('step', 'odd step')
ROUNDING = 1e-6  # Of sums of shares.
LAYERS = (*TINTS, *(kind for kind in SPAN_KINDS if kind != 'step'))


def limits(timeline: Timeline) -> tuple[float, float]:
  """Returns the earliest and the latest time of spans and marks, in seconds."""
  times_s = [s.begin_s for s in timeline.spans]
  times_s += [s.end_s for s in timeline.spans]
  times_s += [at_s for at_s, _, _ in timeline.marks]
  begin_s, end_s = min(times_s, default=0.0), max(times_s, default=1.0)
  return begin_s, end_s if end_s > begin_s else begin_s + 1.0


def per_column(timeline: Timeline, columns: int) -> np.ndarray:
  """Returns the share of each column's time that a lane spends on each layer.

  Args:
    timeline: with spans in any order; those of a lane may overlap.
    columns: number of columns of equal width, over the whole timeline.

  Returns:
    Shares [lane, layer, column] in LAYERS' order; for a lane and column they
    sum to at most 1, even if spans overlap. A column that contains no whole
    span and no overlap belongs to one layer, or to none.
  """
  edges_s = np.linspace(*limits(timeline), columns + 1)
  shares = np.zeros((len(timeline.lanes), len(LAYERS), columns))
  times_s = [[] for _ in timeline.lanes]
  for (lane, layer), spans in _by_layer(timeline).items():
    covered_s = _covered_s(np.asarray(spans), edges_s)
    shares[lane, layer] = np.diff(covered_s) / np.diff(edges_s)
    times_s[lane].append(np.ravel(spans))
  crowded = shares.sum(axis=1)  # [lane, column]
  shares /= np.maximum(crowded[:, None], 1.0)
  for lane, of_lane in enumerate(times_s):
    if of_lane:
      borders_s = np.unique(np.concatenate(of_lane))
      plain = np.histogram(borders_s, edges_s)[0] <= 1
      plain &= crowded[lane] < 1.0 + ROUNDING
      shares[lane][:, plain] = _most(shares[lane][:, plain])
  return shares


def of_kinds(timeline: Timeline) -> dict[str, float]:
  """Each kind's share of all lanes' time, in SPAN_KINDS' order; no zeros."""
  begin_s, end_s = limits(timeline)
  whole_s = (end_s - begin_s) * max(1, len(timeline.lanes))
  spent_s = collections.Counter()
  for span in timeline.spans:
    spent_s[span.kind] += span.end_s - span.begin_s
  return {k: spent_s[k] / whole_s for k in SPAN_KINDS if spent_s[k]}


def _by_layer(timeline: Timeline) -> dict:
  """Returns (begin, end) of the spans of each lane and layer."""
  found = collections.defaultdict(list)
  steps = collections.Counter()
  for span in sorted(timeline.spans, key=lambda s: (s.lane, s.begin_s)):
    kind = span.kind
    if kind == 'step':
      kind = TINTS[steps[span.lane] % len(TINTS)]
      steps[span.lane] += 1
    found[span.lane, LAYERS.index(kind)].append((span.begin_s, span.end_s))
  return found


def _most(shares: np.ndarray) -> np.ndarray:
  """Returns 1 for the layer (or the blank) with most of each column, else 0."""
  blank = 1.0 - shares.sum(axis=0, keepdims=True)
  winner = np.vstack([shares, blank]).argmax(axis=0)
  return (winner == np.arange(len(shares))[:, None]).astype(float)


def _covered_s(
  spans: np.ndarray,  # [spans, 2]: begin, end.
  until_s: Sequence[float],
) -> np.ndarray:
  """The integral of the number of open spans, up to each of `until_s`."""
  times_s = spans.ravel()
  changes = np.tile([1.0, -1.0], len(spans))
  order = np.argsort(times_s, kind='stable')
  times_s, still_open = times_s[order], np.cumsum(changes[order])
  covered_s = np.concatenate(
    [[0.0], np.cumsum(still_open[:-1] * np.diff(times_s))]
  )
  return np.interp(until_s, times_s, covered_s)
