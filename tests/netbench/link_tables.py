# SPDX-License-Identifier: Apache-2.0
"""The tables of measured and predicted cells."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import rich.table

from diloco.pages import text_tables
from tests.netbench.net_systems import SYSTEMS
from tests.netbench.studies import StudyCell
from tests.netbench.system_run import NetCell

WANTED = 0.9
NOTHING = '—'
Point = tuple[float, float | None]  # Mbit/s, and a share.


def bandwidth(points: Sequence[Point], wanted: float) -> tuple[str, float]:
  """Returns the rate at which a share reaches `wanted`, and how it is bounded.

  Between two rates it is interpolated along the logarithm of the rate.

  Returns:
    '', '<=' or '>', and Mbit/s.
  """
  rising = sorted(points)
  if rising[0][1] >= wanted:
    return '<=', rising[0][0]
  for (low, below), (high, above) in itertools.pairwise(rising):
    if below < wanted <= above:
      part = (wanted - below) / (above - below)
      return '', math.exp(
        math.log(low) + part * (math.log(high) - math.log(low))
      )
  return '>', rising[-1][0]


def cell_table(
  cells: Sequence[NetCell], delay_ms: float = 0.0
) -> rich.table.Table:
  """Returns one row per system and rate, measured beside predicted."""
  delay = f', each packet {delay_ms:g} ms under way' if delay_ms else ''
  return text_tables.table(
    f'Over shaped links{delay}: measured, and what the simulator predicts',
    (
      *('system', 'Mbit/s', 'utilisation %', 'predicted %', 'rounds %'),
      *('predicted %', 'sent kB/step', 'predicted kB', 'busiest link %'),
    ),
    [
      (
        SYSTEMS[cell.system].title,
        f'{cell.mbits:g}',
        _percent(cell.utilisation),
        _percent(cell.predicted.utilisation),
        _percent(cell.pace),
        _percent(cell.predicted.pace),
        f'{1e-3 * cell.sent_bytes:.1f}',
        f'{1e-3 * cell.predicted.sent_bytes:.1f}',
        _percent(cell.busiest),
      )
      for cell in cells
    ],
  )


def bandwidths(cells: Sequence[NetCell]) -> dict[str, dict[str, tuple]]:
  """Returns the rate that each system needs, by system, then by figure."""
  found: dict[str, dict[str, tuple]] = {}
  for name in dict.fromkeys(cell.system for cell in cells):
    own = [cell for cell in cells if cell.system == name]
    shares: dict[str, Callable[[NetCell], float | None]] = {
      'utilisation': lambda cell: cell.utilisation,
      'utilisation_predicted': lambda cell: cell.predicted.utilisation,
    }
    if not SYSTEMS[name].waits:
      shares |= {
        'rounds': lambda cell: cell.pace,
        'rounds_predicted': lambda cell: cell.predicted.pace,
      }
    found[name] = {
      figure: bandwidth([(cell.mbits, share(cell)) for cell in own], WANTED)
      for figure, share in shares.items()
    }
  return found


def bandwidth_table(cells: Sequence[NetCell]) -> rich.table.Table:
  """Returns one row per system with the rates that it needs."""
  figures = (
    'utilisation',
    'utilisation_predicted',
    'rounds',
    'rounds_predicted',
  )
  percent = f'{100 * WANTED:g} %'
  return text_tables.table(
    f'Mbit/s that each link needs for {percent}, interpolated',
    (
      *('system', f'{percent} utilisation', 'predicted'),
      *(f'{percent} of the rounds', 'predicted'),
    ),
    [
      (SYSTEMS[name].title, *(_rate(needs.get(figure)) for figure in figures))
      for name, needs in bandwidths(cells).items()
    ],
  )


def notes(cells: Sequence[NetCell], points: float) -> Iterator[str]:
  """Yields what a reader of the tables must know.

  Args:
    points: a cell whose utilisation is further than this from the prediction
      is named, in percentage points.
  """
  yield (
    'utilisation: step time of processes that exchange nothing over that in '
    'the cell; rounds: closed, of those that the steps made due. A decoupled '
    'learner does not wait: a slow link costs it rounds, not steps.'
  )
  yield (
    "sent: by the counters of a member's interface, with all headers; busiest: "
    "of all links and directions, the syncer's too, which is no faster."
  )
  apart = [
    f'{cell.system} at {cell.mbits:g} Mbit/s by {by:+.1f}'
    for cell in cells
    if abs(by := 100 * (cell.utilisation - cell.predicted.utilisation)) > points
  ]
  yield (
    f'apart from the prediction by more than {points:g} points: '
    f'{", ".join(apart) or "no cell"}. It counts no computing, no disk and no '
    'start of a TCP transfer; systems that wait, wait for these too.'
  )


def study_table(title: str, cells: Sequence[StudyCell]) -> rich.table.Table:
  """Returns a row per group of learners, phase and run of a study."""

  def both(cell: StudyCell, name: str, factor: float = 100.0) -> str:
    pair = (getattr(x, name) for x in (cell.measured, cell.predicted))
    texts = [NOTHING if x is None else f'{factor * x:.1f}' for x in pair]
    return NOTHING if texts == [NOTHING] * 2 else f'{texts[0]} ({texts[1]})'

  return text_tables.table(
    f'{title}: measured (predicted)',
    (
      *('run', 'phase', 'learners', 'steps %', 'rounds %', 'takes part %'),
      *('age, steps', 'tokens', 'merged %', 'overwritten, lost %'),
    ),
    [
      (
        cell.run,
        cell.phase,
        f'{cell.learners} {cell.group}',
        both(cell, 'steps'),
        both(cell, 'pace'),
        both(cell, 'participation'),
        both(cell, 'age_steps', 1.0),
        both(cell, 'trained', 1.0),
        both(cell, 'merged'),
        both(cell, 'gone'),
      )
      for cell in cells
    ],
    left=3,
  )


STUDY_NOTE = (
  'steps: made, of those that the sleep of a step allows; rounds: closed, of '
  'those that the fastest learner made due; takes part: share of these rounds '
  'that a learner is in; age: steps that a learner made from its offer to the '
  'merge; merged, overwritten, lost: of the tokens trained in the window, so '
  'what is pending at its ends moves them by a few points.'
)


def as_json(cells: Sequence[NetCell]) -> list[dict]:
  """Returns all figures of the cells."""
  return [
    {**dataclasses.asdict(cell), 'utilisation': cell.utilisation}
    for cell in cells
  ]


def _percent(share: float | None) -> str:
  return NOTHING if share is None else f'{100 * share:.1f}'


def _rate(need: tuple[str, float] | None) -> str:
  if need is None:
    return NOTHING
  sign, mbits = need
  return f'{sign.replace("<=", "≤")} {mbits:.3g}'.strip()
