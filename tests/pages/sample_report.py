# SPDX-License-Identifier: Apache-2.0
"""A report that has every kind of part, and text that needs escaping."""

import math
import random

from diloco.pages.parts import (
  Chart,
  Column,
  Line,
  ReportPage,
  Table,
  Timeline,
  TimelineSpan,
)

CHIPS = (150_000.0, 300_000.0, 600_000.0, 1_200_000.0, 2_400_000.0)


def report() -> ReportPage:
  return ReportPage(
    name='sample',
    title='Goodput of <fleets> & friends',
    command='python -m diloco.simulate --config=experiments/goodput.py',
    paragraphs=(
      'Interruptions are drawn per chip (MTBI 1 year); a learner that loses a '
      'slice pauses, runs on without it, and pauses again when it is back.',
      'Goodput is the share of the allocated time that went into steps; '
      '"quotes" & <tags> are text.',
    ),
    parts=(goodput(), wide(), chart(), bandwidth(), timeline()),
  )


def goodput() -> Table:
  return Table(
    'goodput',
    'Goodput in % of the allocated time',
    (
      Column('system'),
      Column('learners'),
      Column('chips'),
      Column('simulated', 1, spread='simulated spread'),
      Column('simulated spread', hidden=True),
      Column('closed form'),
      Column('paper', 0),
    ),
    (
      ('data-parallel', 1, 1_200_000, 24.712345, 0.3, 24.7, 27.0),
      ('elastic data-parallel', 1, 1_200_000, 55.31, 0.25, 55.3, 58.0),
      ('Decoupled DiLoCo', 8, 1_200_000, 89.04, 0.12, 89.0, 88.0),
      ('a <system> & more', 16, 2_400_000, None, None, None, None),
    ),
    notes=('Means over 3 seeds ± their standard deviation.', 'A < B & C.'),
  )


def wide() -> Table:
  names = ('merges per hour', 'participation', 'staleness', 'bytes up')
  return Table(
    'wide',
    'Learners of one run, with many columns',
    (
      Column('learner'),
      *(Column(f'{name} {i}', i) for i in range(4) for name in names),
    ),
    (
      *(
        (f'learner {m}', *(1000.0 * m / (k + 7) for k in range(16)))
        for m in range(3)
      ),
      ('none', *[None] * 14, math.inf, math.nan),
    ),
  )


def chart() -> Chart:
  lines = []
  for group, (label, learners) in enumerate(
    (('elastic data-parallel', 1), ('M = 4', 4), ('M = 8', 8))
  ):
    loads = [13.7 * n / learners / 31_536_000 for n in CHIPS]
    exact = tuple(100 * _running(load) for load in loads)
    near = tuple(y + 0.7 * (-1) ** i for i, y in enumerate(exact))
    spreads = (0.3, 0.5, 0.6, 1.1, 1.4)
    lines += [
      Line(label, 'simulated', CHIPS, near, spreads, group),
      Line(label, 'closed form', CHIPS, exact, group=group),
      Line(label, 'paper', CHIPS, tuple(map(round, exact)), group=group),
    ]
  lines.append(Line('a real run', 'measured', (6e5,), (91.0,), group=3))
  return Chart(
    'goodput',
    'Goodput against chips',
    'chips',
    'goodput (%)',
    tuple(lines),
    log_x=True,
    y_range=(0.0, 102.0),
    notes=('The paper: Table 1.',),
  )


def bandwidth() -> Chart:
  xs = tuple(0.1 * 2**i for i in range(12))
  return Chart(
    'utilisation',
    'Compute utilisation against bandwidth',
    'Gbit/s',
    'utilisation (%)',
    tuple(
      Line(
        name, 'simulated', xs, tuple(100 / (1 + need / x) for x in xs), (), i
      )
      for i, (name, need) in enumerate(
        (('data-parallel', 40.0), ('streaming', 0.9), ('Decoupled', 0.3))
      )
    ),
    log_x=True,
  )


def timeline() -> Timeline:
  """Eight learners and the syncer for five minutes."""
  rng = random.Random(7)
  spans, marks = [], []
  for lane in range(8):
    at_s = 0.0
    while at_s < 300.0:
      if rng.random() < 0.01:
        kinds = (('dead', 20.0), ('bootstrap', 8.0))
        if rng.random() < 0.7:
          kinds = (('pause', 13.7),)
        for kind, length_s in kinds:
          spans.append(TimelineSpan(lane, at_s, at_s + length_s, kind))
          at_s += length_s
      length_s = rng.gauss(1.0, 0.1)
      spans.append(TimelineSpan(lane, at_s, at_s + length_s, 'step'))
      at_s += length_s
      if lane == 3:
        spans.append(TimelineSpan(lane, at_s, at_s + 0.5, 'waiting'))
        at_s += 0.5
  for i in range(300):
    spans.append(TimelineSpan(8, i, i + 0.4, 'round', f'round {i}'))
    spans.append(TimelineSpan(8, i + 0.4, i + 0.9, 'grace'))
    marks += [(i + 0.9, m, f'merged {i}') for m in range(8) if m != i % 8]
  marks.append((120.0, -1, 'the syncer dies'))
  return Timeline(
    'lanes',
    'The first five minutes of 1.2 M chips',
    (*(f'learner {m}' for m in range(8)), 'syncer'),
    tuple(spans),
    tuple(marks),
    notes=('One lane per learner.',),
  )


def _running(load: float) -> float:
  """g of 1 − g = load·g·(1 + g)."""
  b = 1 + load
  return (-b + math.sqrt(b * b + 4 * load)) / (2 * load)
