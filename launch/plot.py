# SPDX-License-Identifier: Apache-2.0
"""Draws the losses of a run over time and over the global step."""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Sequence

from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.status import Evaluation
from diloco.metrics.workdir import Workdir, learner_name


@dataclasses.dataclass(frozen=True)
class LossCurve:
  """Training loss of one learner; a gap (NaN) parts its incarnations."""

  learner: int
  times_s: tuple[float, ...]  # Since the first record of the run.
  steps: tuple[float, ...]  # Global steps.
  losses: tuple[float, ...]
  kills: tuple[tuple[float, float], ...]  # (time, global step) of the last
  rejoins: tuple[tuple[float, float], ...]  # record before, the first after.


def curves(workdir: Workdir, learners: int) -> list[LossCurve]:
  """Returns loss curves from the learners' metrics and the launcher's
  events.
  """
  records = [
    [
      record
      for record in read_jsonl(workdir.metrics(learner_name(i)))
      if names.TRAIN_LOSS in record
    ]
    for i in range(learners)
  ]
  times_s = [record[names.TIME] for many in records for record in many]
  start_s = min(times_s, default=0.0)
  kills = collections.defaultdict(list)
  for event in read_jsonl(workdir.events):
    if event['event'] == 'killed':
      kills[event['process']].append(event['time_s'])
  return [
    _curve(i, many, kills[learner_name(i)], start_s)
    for i, many in enumerate(records)
  ]


def draw(
  path: pathlib.Path,
  title: str,
  shown: Sequence[LossCurve],
  evaluation: Evaluation,
) -> None:
  """Writes a PNG; raises ImportError where matplotlib is not installed."""
  from matplotlib import figure  # Heavy, and an extra: `plot`.

  token = 'byte' if evaluation.bytes_per_token == 1 else 'token'
  page = figure.Figure(figsize=(11, 4.2), layout='constrained')
  by_time, by_step = page.subplots(1, 2, sharey=True)
  for axes, horizontal, place in (
    (by_time, 'times_s', 0),
    (by_step, 'steps', 1),
  ):
    for curve in shown:
      _draw_curve(axes, curve, getattr(curve, horizontal), place)
    ends = [x for c in shown for x in getattr(c, horizontal) if x == x]
    axes.plot(
      [0, max(ends, default=1)],
      [evaluation.initial_loss, evaluation.final_loss],
      'k*',
      markersize=11,
      label='validation, global model',
    )
    if evaluation.bigram_loss is not None:
      axes.axhline(
        evaluation.bigram_loss, color='gray', ls='--', label='bigram entropy'
      )
    axes.grid(alpha=0.3)
  by_time.set(xlabel='seconds', ylabel=f'loss (nats per {token})')
  by_step.set(xlabel='global step')
  by_step.legend(fontsize='small')
  page.suptitle(title)
  page.savefig(path, dpi=120)


def _curve(
  learner: int,
  records: Sequence[dict],
  killed_s: Sequence[float],
  start_s: float,
) -> LossCurve:
  times_s, steps, losses = [], [], []
  kills, rejoins = [], []
  open_kills = sorted(killed_s)
  last = None
  for record in records:
    here = (record[names.TIME] - start_s, record[names.GLOBAL_STEP])
    if last and record[names.INCARNATION] != last[names.INCARNATION]:
      times_s.append(math.nan)
      steps.append(math.nan)
      losses.append(math.nan)
    while open_kills and open_kills[0] < record[names.TIME]:
      kill_s = open_kills.pop(0)
      if last:
        kills.append((kill_s - start_s, last[names.GLOBAL_STEP]))
        rejoins.append(here)
    times_s.append(here[0])
    steps.append(here[1])
    losses.append(record[names.TRAIN_LOSS])
    last = record
  if last:  # Killed and never seen again.
    end = last[names.GLOBAL_STEP]
    kills += [(kill_s - start_s, end) for kill_s in open_kills]
  return LossCurve(
    learner,
    tuple(times_s),
    tuple(steps),
    tuple(losses),
    tuple(kills),
    tuple(rejoins),
  )


def _draw_curve(
  axes, curve: LossCurve, xs: Sequence[float], place: int
) -> None:
  color = f'C{curve.learner}'
  name = f'learner {curve.learner}'
  axes.plot(xs, curve.losses, color=color, lw=1, alpha=0.8, label=name)
  for points, mark, word in (
    (curve.kills, 'x', 'killed'),
    (curve.rejoins, '^', 'back'),
  ):
    for i, point in enumerate(points):
      axes.axvline(point[place], color=color, ls=':', lw=1)
      axes.plot(
        [point[place]],
        [0.97],
        mark,
        color=color,
        transform=axes.get_xaxis_transform(),
        label=f'{name} {word}' if i == 0 else None,
      )
