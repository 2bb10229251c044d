# SPDX-License-Identifier: Apache-2.0
"""A report that has every kind of part, and text that needs escaping."""

import math

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
  for group, (label, exact) in enumerate(
    (
      ('elastic data-parallel', (84.2, 71.0, 58.1, 39.8, 26.7)),
      ('M = 4', (96.1, 92.6, 86.1, 75.3, 61.4)),
      ('M = 8', (98.0, 96.2, 92.6, 86.1, 75.3)),
    )
  ):
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
  """A learner that dies, one that pauses and waits, and the syncer."""
  spans = [
    TimelineSpan(0, 0.0, 20.0, 'step'),
    TimelineSpan(0, 20.0, 30.0, 'dead'),
    TimelineSpan(0, 30.0, 38.0, 'bootstrap'),
    TimelineSpan(1, 0.0, 50.0, 'step'),
    TimelineSpan(1, 50.0, 63.7, 'pause'),
    TimelineSpan(1, 63.7, 64.2, 'waiting'),
  ]
  for i in range(60):
    spans.append(TimelineSpan(2, i, i + 0.4, 'round', f'round {i}'))
    spans.append(TimelineSpan(2, i + 0.4, i + 0.9, 'grace'))
  return Timeline(
    'lanes',
    'The first minute',
    ('learner 0', 'learner 1', 'syncer'),
    tuple(spans),
    ((0.9, 1, 'merged 0'), (120.0, -1, 'the syncer dies')),
    notes=('One lane per learner.',),
  )
