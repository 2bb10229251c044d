# SPDX-License-Identifier: Apache-2.0
"""Shows a run as it goes, and the table at its end."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import rich.console
import rich.live
import rich.table
import rich.text

from diloco.metrics import ages, status, token_ledger
from diloco.metrics.run_progress import ProgressMeter, RunProgress, clock
from diloco.metrics.status import (
  Evaluation,
  LearnerStatus,
  RunStatus,
  RunSummary,
  bytes_per_parameter,
)
from diloco.metrics.token_ledger import TokenCounts
from diloco.metrics.workdir import Workdir, learner_name
from diloco.pages import text_tables
from launch import exit_policy
from launch.exit_policy import RUNNING
from launch.supervisor import ProcessState

TABLE_EVERY_S = 0.5
LINE_EVERY_S = 5.0
LINE_MAX = 120  # Characters of a line in a log.
WIDE = 110  # Columns of a terminal that has room for `WIDE_COLUMNS`.
UNITS = ('B', 'kB', 'MB', 'GB', 'TB')

COLUMNS = (
  'process',
  'state',
  'at step',
  'loss',
  'tok/s',
  'round',
  'lag',
  'up',
  'down',
  'merged',
  'starts',
)
WIDE_COLUMNS = (*COLUMNS, 'own steps', 'offer age', 'longest stall')
STYLES = {
  status.LIVE: 'green',
  RUNNING: 'green',
  status.JOINING: 'yellow',
  exit_policy.WAITING: 'yellow',
  status.GONE: 'red',
  exit_policy.DEAD: 'bold red',
  exit_policy.STOPPED: 'red',
  status.LEFT: 'dim',
  exit_policy.FINISHED: 'dim',
}


class Display:
  """The launcher's output between its start and the final table.

  Args:
    workdir: of the run; None: nothing but the status is known.
    tell: takes the first line of the state as well, whenever it is shown,
      without the time elapsed.
  """

  def __init__(
    self,
    console: rich.console.Console,
    workdir: Workdir | None = None,
    tell: Callable[[str], None] | None = None,
  ):
    self._console = console
    self._tell = tell
    self._meter = ProgressMeter(workdir)
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
    """Prints one permanent line, above the table."""
    self._console.print(line, markup=False, highlight=False, soft_wrap=True)

  def update(
    self, status: RunStatus | None, processes: Sequence[ProcessState]
  ) -> None:
    """Shows the state where the last one is old enough."""
    every_s = TABLE_EVERY_S if self._live else LINE_EVERY_S
    now_s = time.monotonic()
    if now_s - self._shown_s < every_s:
      return
    self.show(status, processes)

  def show(
    self, status: RunStatus | None, processes: Sequence[ProcessState]
  ) -> None:
    """Shows the state now, such as the last one."""
    self._shown_s = time.monotonic()
    processes = [*processes, *joined(status, processes)]
    found = self._meter.look(status, [each.name for each in processes])
    if self._tell is not None:
      self._tell(_headlines(status, found, LINE_MAX, elapsed=False)[0])
    if self._live:
      width = self._console.width
      self._live.update(table(status, processes, found, width), refresh=True)
    else:
      for each in lines(status, processes, found):
        self.say(each)


def joined(
  status: RunStatus | None, processes: Sequence[ProcessState]
) -> list[ProcessState]:
  """Returns the learners that were not started here, such as by hand."""
  known = {each.name for each in processes}
  return [
    ProcessState(name, RUNNING, None, 0)
    for name in _by_process(status)
    if name not in known
  ]


def table(
  status: RunStatus | None,
  processes: Sequence[ProcessState],
  progress: RunProgress,
  width: int,
) -> rich.console.Group:
  """Returns one row per process, with the run's state above them.

  Args:
    width: of the terminal, in characters.
  """
  shown = WIDE_COLUMNS if width >= WIDE else COLUMNS
  learners = _by_process(status)
  rows = [_row(x, learners.get(x.name), progress) for x in processes]
  view = text_tables.table(
    None,
    shown,
    [row[: len(shown)] for row in rows],
    left=2,
    padding=(0, 1) if width >= WIDE else 0,  # 0 fits 80 columns.
  )
  head = [rich.text.Text(each) for each in _headlines(status, progress, width)]
  if status is not None:
    head.append(_bar(status.step / status.total_steps, width))
  return rich.console.Group(*head, view)


def _bar(share: float, width: int) -> rich.text.Text:
  done = round(min(1.0, share) * width)
  bar = rich.text.Text('━' * done, style='green')
  return bar.append('╌' * (width - done), style='dim')


def lines(
  status: RunStatus | None,
  processes: Sequence[ProcessState],
  progress: RunProgress,
) -> list[str]:
  """Returns the table's contents in few lines, for logs."""
  learners = _by_process(status)
  parts = []
  for process in processes:
    learner = learners.get(process.name)
    text = f'{process.name} {_state(process, learner)}'
    if learner is not None and process.state == RUNNING:
      text += f' at step {_at_step(process, learner, progress)}'
      text += f' loss {_loss(learner)}'
    parts.append(text)
  return [
    *_headlines(status, progress, LINE_MAX),
    *(f'  {each}' for each in _packed(parts, ' | ', LINE_MAX - 2)),
  ]


def _packed(parts: Sequence[str], between: str, width: int) -> list[str]:
  """Joins parts to as few lines as they fit into."""
  found: list[str] = []
  for part in parts:
    if found and len(found[-1]) + len(between) + len(part) <= width:
      found[-1] += between + part
    else:
      found.append(part)
  return found


def in_units(nbytes: int) -> str:
  """Bytes as '812 B', '1.3 MB', '123 MB'; one MB is 10⁶ bytes."""
  value = float(nbytes)
  for unit in UNITS[:-1]:
    if value < 999.5:
      digits = 1 if value < 9.95 and unit != 'B' else 0
      return f'{value:.{digits}f} {unit}'
    value /= 1000
  return f'{value:.1f} {UNITS[-1]}'


def _headlines(
  status: RunStatus | None,
  progress: RunProgress,
  width: int,
  elapsed: bool = True,
) -> list[str]:
  """Returns the state of the run, broken between its parts."""
  times = [f'{clock(progress.elapsed_s)} elapsed'] if elapsed else []
  if status is None:
    return ['  '.join(['starting', *times])]
  merged = ','.join(map(str, status.participants)) or 'none'
  heldout = progress.heldout
  if progress.left_s is not None:
    times.append(f'about {clock(progress.left_s)} left')
  parts = [
    f'{status.run}  step {status.step}/{status.total_steps}',
    *([', '.join(times)] if times else []),
    *([f'held-out {heldout[1]:.3f} at {heldout[0]}'] if heldout else []),
    f'round {status.closed_round}',
    f'live {len(status.live)}',
    f'merged {merged}',
    f'grace {status.grace_s:.2f} s',
    f'goodput {status.goodput:.0%}',
  ]
  return _packed(parts, '  ', width)


def _by_process(status: RunStatus | None) -> Mapping[str, LearnerStatus]:
  learners = status.learners if status else ()
  return {learner_name(learner.learner): learner for learner in learners}


def _row(
  process: ProcessState, learner: LearnerStatus | None, progress: RunProgress
) -> list[str | rich.text.Text]:
  """Returns the cells of `WIDE_COLUMNS`."""
  starts = str(process.starts)
  said = _state(process, learner)
  state = rich.text.Text(said, style=STYLES.get(said, ''))
  if learner is None:
    return [process.name, state, *[''] * 8, starts, *[''] * 3]
  return [
    process.name,
    state,
    _at_step(process, learner, progress),
    _loss(learner),
    f'{learner.tokens_per_s:,.0f}',
    str(learner.round),
    str(learner.lag_versions),
    in_units(learner.bytes_up),
    in_units(learner.bytes_down),
    f'{learner.participation:.0%}',
    starts,
    str(learner.step),
    '' if learner.age_steps is None else f'{learner.age_steps:.2f}',
    f'{learner.stall_max_s * 1000:.0f} ms',
  ]


def _at_step(
  process: ProcessState, learner: LearnerStatus, progress: RunProgress
) -> str:
  """The global step: own ones begin anew where a learner has come back."""
  return str(progress.steps.get(process.name, learner.step))


def _state(process: ProcessState, learner: LearnerStatus | None) -> str:
  """The syncer's word for a learner, unless its process does not run."""
  if process.state == RUNNING and learner is not None:
    return learner.state
  return process.state


def _loss(learner: LearnerStatus) -> str:
  return '' if learner.loss is None else f'{learner.loss:.3f}'


def report(
  workdir: Workdir,
  summary: RunSummary,
  evaluation: Evaluation,
  plot: str,
  tokens: Collection[TokenCounts] = (),
) -> rich.console.Group:
  """Everything that a newcomer should see of a finished run.

  Args:
    plot: where the loss plot lies, or why there is none.
    tokens: the token ledger; none where no learner has a tape.
  """
  tables = (
    text_tables.losses(evaluation),
    _learners(summary),
    _run(summary, evaluation, tokens),
    _places(workdir, plot),
  )
  return rich.console.Group(*(part for view in tables for part in ('', view)))


def _learners(summary: RunSummary) -> rich.table.Table:
  return text_tables.table(
    f'Learners, {summary.rounds} rounds',
    (
      'learner', 'merged in', 'age', 'steps', 'tokens', 'starts',
      'longest stall', 'up', 'down',
    ),
    [
      (
        learner_name(learner.learner),
        f'{learner.rounds} ({learner.rounds / max(summary.rounds, 1):.0%})',
        '' if learner.age_steps is None else f'{learner.age_steps:.2f}',
        learner.steps,
        f'{learner.tokens:,}',
        learner.incarnations,
        f'{learner.stall_max_s * 1000:.0f} ms',
        in_units(learner.bytes_up),
        in_units(learner.bytes_down),
      )
      for learner in summary.learners
    ],
  )  # fmt: skip


def _run(
  summary: RunSummary, evaluation: Evaluation, tokens: Collection[TokenCounts]
) -> rich.table.Table:
  up = bytes_per_parameter(
    summary.bytes_up,
    summary.pulls_up,
    summary.fragments,
    evaluation.parameters,
  )
  down = bytes_per_parameter(
    summary.bytes_down,
    summary.pulls_down,
    summary.fragments,
    evaluation.parameters,
  )
  stall_s = max((x.stall_max_s for x in summary.learners), default=0.0)
  rows = (
    ('parameters', f'{evaluation.parameters:,}'),
    ('global steps', f'{summary.step}'),
    ('rounds', f'{summary.rounds}, {summary.refused} contributions refused'),
    ('age of what was merged', ages.text(summary.age_steps, summary.old_share)),
    ('longest step stall', f'{stall_s * 1000:.0f} ms'),
    (
      'bytes per parameter and round',
      f'up {_ratio(up)}, down {_ratio(down)} (f32 4, bf16 2)',
    ),
    ('wall time', f'{summary.wall_s:.0f} s'),
    (
      'goodput',
      f'{summary.goodput:.1%} of the learner time went into steps that count',
    ),
    (
      'uptime',
      f'{summary.uptime:.1%} of the time at least one learner trained',
    ),
  )
  ledger = [('tokens', tokens_text(tokens))] if tokens else []
  returned = (
    (f'back again: {learner_name(each.learner)}', each.beginning)
    for each in summary.learners
    if each.incarnations > 1
  )
  return text_tables.table(
    'Run', ('', ''), (*rows, *ledger, *returned), left=2, header=False
  )


def tokens_text(rows: Collection[TokenCounts]) -> rich.text.Text:
  """Returns text on the tokens' whereabouts; unexplained ones are a defect."""
  text = rich.text.Text(token_ledger.text(token_ledger.total(rows)))
  if missing := token_ledger.unexplained(rows):
    text.append(', ').append(f'{missing:,} unexplained', 'bold red')
  return text


def _places(workdir: Workdir, plot: str) -> rich.table.Table:
  return text_tables.table(
    'Where to look',
    ('', ''),
    (
      ('logs', workdir.log('*').parent),
      ('scalars (JSONL)', workdir.metrics('*').parent),
      ('TensorBoard', workdir.tensorboard('*').parent),
      ('loss plot', plot),
    ),
    left=2,
    header=False,
  )


def _ratio(value: float | None) -> str:
  return 'none' if value is None else f'{value:.3f}'
