# SPDX-License-Identifier: Apache-2.0
"""Shows a run as it goes: a live table, or plain lines where none can be."""

import time
from collections.abc import Mapping, Sequence

import rich.box
import rich.console
import rich.live
import rich.markup
import rich.table

from diloco.metrics.status import LearnerStatus, RunStatus
from diloco.metrics.workdir import learner_name
from launch.exits import RUNNING
from launch.supervisor import ProcessState

TABLE_EVERY_S = 0.5
LINE_EVERY_S = 5.0
UNITS = ('B', 'kB', 'MB', 'GB', 'TB')

COLUMNS = (
  'process',
  'state',
  'step',
  'loss',
  'tok/s',
  'round',
  'lag',
  'up',
  'down',
  'merged',
  'starts',
)


class Display:
  """What the launcher shows between its start and the end table."""

  def __init__(self, console: rich.console.Console):
    self._console = console
    self._live = None
    self._shown_s = -LINE_EVERY_S
    if console.is_terminal:
      # No refresh thread: the launcher forks, and forks from one thread.
      self._live = rich.live.Live(console=console, auto_refresh=False)

  def __enter__(self) -> 'Display':
    if self._live:
      self._live.start()
    return self

  def __exit__(self, *exception) -> None:
    if self._live:
      self._live.stop()

  def say(self, line: str) -> None:
    """One line that stays, above the table."""
    self._console.print(line, markup=False, highlight=False, soft_wrap=True)

  def update(
    self, status: RunStatus | None, processes: Sequence[ProcessState]
  ) -> None:
    """Shows the state where the last one is old enough."""
    every_s = TABLE_EVERY_S if self._live else LINE_EVERY_S
    now_s = time.monotonic()
    if now_s - self._shown_s < every_s:
      return
    self._shown_s = now_s
    if self._live:
      self._live.update(table(status, processes), refresh=True)
    else:
      self.say(line(status, processes))


def table(
  status: RunStatus | None, processes: Sequence[ProcessState]
) -> rich.table.Table:
  """One row per process, the run's state above them."""
  view = rich.table.Table(
    title=rich.markup.escape(_headline(status)),
    title_justify='left',
    box=rich.box.SIMPLE_HEAD,
    padding=0,  # Fits a terminal of 80 columns.
    show_edge=False,
  )
  for name in COLUMNS:
    justify = 'left' if name in ('process', 'state') else 'right'
    view.add_column(name, justify=justify, no_wrap=True)
  learners = _by_process(status)
  for process in processes:
    view.add_row(*_row(process, learners.get(process.name)))
  return view


def line(status: RunStatus | None, processes: Sequence[ProcessState]) -> str:
  """The same on one line, for logs."""
  learners = _by_process(status)
  parts = [_headline(status)]
  for process in processes:
    learner = learners.get(process.name)
    text = f'{process.name} {_state(process, learner)}'
    if learner is not None and process.state == RUNNING:
      text += f' step {learner.step} loss {_loss(learner)}'
    parts.append(text)
  return ' | '.join(parts)


def in_units(nbytes: int) -> str:
  """Bytes as '812 B', '1.3 MB', '123 MB'; one MB is 10⁶ bytes."""
  value = float(nbytes)
  for unit in UNITS[:-1]:
    if value < 999.5:
      digits = 1 if value < 9.95 and unit != 'B' else 0
      return f'{value:.{digits}f} {unit}'
    value /= 1000
  return f'{value:.1f} {UNITS[-1]}'


def _headline(status: RunStatus | None) -> str:
  if status is None:
    return 'starting'
  merged = ','.join(map(str, status.participants)) or 'none'
  return (
    f'{status.run}  step {status.step}/{status.total_steps}  '
    f'round {status.closed_round}  live {len(status.live)}  '
    f'merged {merged}  grace {status.grace_s:.2f} s  '
    f'goodput {status.goodput:.0%}'
  )


def _by_process(status: RunStatus | None) -> Mapping[str, LearnerStatus]:
  learners = status.learners if status else ()
  return {learner_name(learner.learner): learner for learner in learners}


def _row(process: ProcessState, learner: LearnerStatus | None) -> list[str]:
  starts = str(process.starts)
  if learner is None:
    blank = [''] * (len(COLUMNS) - 3)
    return [process.name, _state(process, None), *blank, starts]
  return [
    process.name,
    _state(process, learner),
    str(learner.step),
    _loss(learner),
    f'{learner.tokens_per_s:,.0f}',
    str(learner.round),
    str(learner.lag_versions),
    in_units(learner.bytes_up),
    in_units(learner.bytes_down),
    f'{learner.participation:.0%}',
    starts,
  ]


def _state(process: ProcessState, learner: LearnerStatus | None) -> str:
  """The syncer's word for a learner, unless its process does not run."""
  if process.state == RUNNING and learner is not None:
    return learner.state
  return process.state


def _loss(learner: LearnerStatus) -> str:
  return '' if learner.loss is None else f'{learner.loss:.3f}'
