# SPDX-License-Identifier: Apache-2.0
"""Draws the losses of a run over time: the global model's before the learners'.

The global model's is a curve where an evaluator ran beside the run
(`run.eval_every_rounds`); else it is known at the start and at the end.
"""

import bisect
import collections
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Sequence

from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.status import Evaluation
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name
from diloco.pages.colours import COLOURS

MARKED_MAX = 60  # More points than these hide the line.


@dataclasses.dataclass(frozen=True)
class LossCurve:
  """Training loss of one learner; a gap (NaN) parts its incarnations."""

  learner: int
  times_s: tuple[float, ...]  # Since the first record of the run.
  steps: tuple[float, ...]  # Global steps.
  losses: tuple[float, ...]
  kills: tuple[tuple[float, float], ...]  # (time, global step) of the last
  rejoins: tuple[tuple[float, float], ...]  # record before, the first after.


@dataclasses.dataclass(frozen=True)
class LossCurves:
  """Losses of a run; times in seconds since its first record."""

  learners: tuple[LossCurve, ...]
  heldout: tuple[tuple[float, float], ...]  # (time, loss) of the global model.


def curves(workdir: Workdir, learners: int) -> LossCurves:
  """Returns losses from the processes' metrics and the launcher's events."""
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
  return LossCurves(
    tuple(
      _curve(i, many, kills[learner_name(i)], start_s)
      for i, many in enumerate(records)
    ),
    tuple(
      (record[names.TIME] - start_s, record[names.EVAL_LOSS])
      for record in read_jsonl(workdir.metrics(EVALUATOR))
      if names.EVAL_LOSS in record
    ),
  )


def draw(
  path: pathlib.Path,
  title: str,
  shown: LossCurves,
  evaluation: Evaluation,
) -> None:
  """Writes a PNG; raises ImportError where matplotlib is not installed."""
  picture(title, shown, evaluation).savefig(path, dpi=120)


def picture(title: str, shown: LossCurves, evaluation: Evaluation):
  """Returns the figure."""
  from matplotlib import figure  # Heavy, and an extra: `plot`.

  token = 'byte' if evaluation.bytes_per_token == 1 else 'token'
  page = figure.Figure(figsize=(9, 4.8), layout='constrained')
  axes = page.subplots()
  for curve in shown.learners:
    _draw_curve(axes, curve)
  ends_s = [x for curve in shown.learners for x in curve.times_s if x == x]
  end_s = max(ends_s, default=1.0)
  _draw_global(axes, shown.heldout, evaluation, end_s)
  if evaluation.bigram_loss is not None:
    axes.axhline(
      evaluation.bigram_loss, color='gray', ls='--', label='bigram entropy'
    )
  axes.set(xlabel='seconds', ylabel=f'loss, nats per {token}')
  axes.grid(alpha=0.3)
  axes.spines['right'].set_visible(False)
  _add_steps(axes, shown.learners)
  axes.set_title(title, loc='left', weight='bold')
  axes.legend(fontsize='small', frameon=False)
  return page


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


def _draw_global(axes, heldout, evaluation: Evaluation, end_s: float) -> None:
  """Draws the global model; its begin and end alone are not joined."""
  between = [point for point in heldout if 0 < point[0] < end_s]
  points = [
    (0.0, evaluation.initial_loss),
    *between,
    (end_s, evaluation.final_loss),
  ]
  axes.plot(
    *zip(*points),
    color='black',
    ls='-' if between else '',
    lw=2,
    marker='o' if len(points) <= MARKED_MAX else '',
    ms=3.5 if between else 9,
    zorder=5,
    label=f'global model, held-out: {evaluation.final_loss:.3f} at the end',
  )


def _draw_curve(axes, curve: LossCurve) -> None:
  """Draws a learner behind the global model; marks its kills and returns."""
  color = COLOURS[curve.learner % len(COLOURS)]
  name = f'learner {curve.learner}'
  axes.plot(
    curve.times_s,
    curve.losses,
    color=color,
    lw=0.9,
    alpha=0.45,
    label=f'{name}, training batches',
  )
  for points, mark, word in (
    (curve.kills, 'x', 'killed'),
    (curve.rejoins, '^', 'back'),
  ):
    for i, (at_s, _) in enumerate(points):
      axes.axvline(at_s, color=color, ls=':', lw=1)
      axes.plot(
        [at_s],
        [0.97],
        mark,
        color=color,
        transform=axes.get_xaxis_transform(),
        label=f'{name} {word}' if i == 0 else None,
      )


def _add_steps(axes, learners: Sequence[LossCurve]) -> None:
  """Adds an axis of the global step, by the records of all learners."""
  known = sorted(
    {
      (at_s, step)
      for curve in learners
      for at_s, step in zip(curve.times_s, curve.steps)
      if at_s == at_s
    }
  )
  if len(known) < 2:
    return
  from matplotlib import ticker

  times_s, steps = zip(*known)
  steps = [*itertools.accumulate(steps, max)]
  marks = {}  # Where a step was first known -> its name.
  for step in ticker.MaxNLocator(8, integer=True).tick_values(0, steps[-1]):
    if 0 <= step <= steps[-1]:
      at_s = times_s[bisect.bisect_left(steps, step)]
      if all(abs(at_s - other_s) > times_s[-1] / 20 for other_s in marks):
        marks[at_s] = f'{step:.0f}'
  above = axes.secondary_xaxis('top')
  above.set_xticks([*marks], [*marks.values()])
  above.set_xlabel('global step')
