# SPDX-License-Identifier: Apache-2.0
"""Shows a run as it goes, and the table at its end."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import rich.console
import rich.live
import rich.table
import rich.text

from diloco.metrics import figures, status, token_ledger
from diloco.metrics.figures import clock
from diloco.metrics.run_progress import Pace
from diloco.metrics.status import Evaluation, LearnerStatus, RunStatus
from diloco.metrics.token_ledger import TokenCounts
from diloco.metrics.workdir import Workdir, learner_name
from diloco.pages import text_tables
from launch import supervisor
from launch.program import LEARNER
from launch.supervisor import RUNNING, ProcessState

TABLE_EVERY_S = 0.5
LINE_EVERY_S = 5.0
COMPILING = 'compiling'
LINE_MAX = 120  # Characters of a line in a log.
WIDE = 110  # Columns of a terminal that has room for `figures.WIDE`.
STYLES = {
  status.LIVE: 'green',
  RUNNING: 'green',
  status.JOINING: 'yellow',
  COMPILING: 'yellow',
  supervisor.WAITING: 'yellow',
  status.GONE: 'red',
  supervisor.DEAD: 'bold red',
  supervisor.STOPPED: 'red',
  status.LEFT: 'dim',
  supervisor.FINISHED: 'dim',
}


def say(console: rich.console.Console, text: str) -> None:
  """Prints a line as it is, however long."""
  console.print(text, markup=False, highlight=False, soft_wrap=True)


class Display:
  """The launcher's output between its start and the final table.

  Args:
    tell: takes the first line of the state as well, whenever it is shown,
      without times.
  """

  def __init__(
    self,
    console: rich.console.Console,
    tell: Callable[[str], None] | None = None,
  ):
    self._console = console
    self._tell = tell
    self._pace = Pace()
    self._began_s = time.monotonic()
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
    say(self._console, line)

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
    if self._tell is not None:
      self._tell(headlines(status, None, LINE_MAX)[0])
    times = self._times(status)
    if self._live:
      width = self._console.width
      self._live.update(table(status, processes, times, width), refresh=True)
    else:
      for line in lines(status, processes, times):
        self.say(line)

  def _times(self, status: RunStatus | None) -> str:
    """Returns the time of the run, with the time left once it is known.

    Before the first learner is ready it is that of the launcher.
    """
    if status is None or status.elapsed_s is None:
      return clock(time.monotonic() - self._began_s)
    elapsed, left_s = clock(status.elapsed_s), self._pace.left_s(status)
    return elapsed if left_s is None else f'{elapsed}, {clock(left_s)} left'


def joined(
  status: RunStatus | None, processes: Sequence[ProcessState]
) -> list[ProcessState]:
  """Returns the learners that were not started here, such as by hand."""
  known = {x.name for x in processes}
  return [
    ProcessState(name, RUNNING, None, 0)
    for name in _by_process(status)
    if name not in known
  ]


def table(
  status: RunStatus | None,
  processes: Sequence[ProcessState],
  times: str,
  width: int,
) -> rich.console.Group:
  """Returns one row per process, with the run's state above them.

  Args:
    times: of the run, as text.
    width: of the terminal, in characters.
  """
  columns = [*figures.shown(figures.LEARNER, *_surfaces(width))]
  learners = _by_process(status)
  view = text_tables.table(
    None,
    ('process', 'state', *(x.label for x in columns), 'starts'),
    [_row(x, learners.get(x.name), columns) for x in processes],
    left=2,
    padding=(0, 1) if width >= WIDE else 0,  # 0 fits 80 columns.
  )
  head = [rich.text.Text(x) for x in headlines(status, times, width)]
  if status is not None:
    head.append(_bar(status.step / status.total_steps, width))
  return rich.console.Group(*head, view)


def _surfaces(width: int) -> tuple[str, ...]:
  return (figures.LIVE, figures.WIDE) if width >= WIDE else (figures.LIVE,)


def _bar(share: float, width: int) -> rich.text.Text:
  done = round(min(1.0, share) * width)
  bar = rich.text.Text('━' * done, style='green')
  return bar.append('╌' * (width - done), style='dim')


def lines(
  status: RunStatus | None, processes: Sequence[ProcessState], times: str
) -> list[str]:
  """Returns the table's contents in few lines, for logs."""
  learners = _by_process(status)
  parts = []
  for process in processes:
    learner = learners.get(process.name)
    text = f'{process.name} {_state(process, learner)}'
    if learner is not None and process.state == RUNNING:
      text += ''.join(
        f' {x.label} {x.text_in(learner)}'
        for x in figures.shown(figures.LEARNER, figures.LINE)
      )
    parts.append(text)
  return [
    *headlines(status, times, LINE_MAX),
    *(f'  {x}' for x in _packed(parts, ' | ', LINE_MAX - 2)),
  ]


def _packed(parts: Sequence[str], between: str, width: int) -> list[str]:
  """Joins parts to as few lines as they fit into."""
  lines: list[str] = []
  for part in parts:
    if lines and len(lines[-1]) + len(between) + len(part) <= width:
      lines[-1] += between + part
    else:
      lines.append(part)
  return lines


def headlines(
  status: RunStatus | None, times: str | None, width: int
) -> list[str]:
  """Returns the state of the run, broken between its parts.

  Args:
    times: of the run, as text; None: the line has a clock of its own.
  """
  if status is None:
    return ['  '.join(['starting', *([times] if times else [])])]
  if status.elapsed_s is None:  # No learner is ready yet.
    return ['  '.join([status.run, COMPILING, *([times] if times else [])])]
  parts = [status.run]
  for figure in figures.shown(figures.RUN, *_surfaces(width)):
    if figure.name == 'elapsed_s':
      parts += [times] if times else []
    elif figure.value(status) is not None:
      parts.append(f'{figure.short or figure.label} {figure.text_in(status)}')
  return _packed(parts, '  ', width)


def _by_process(status: RunStatus | None) -> Mapping[str, LearnerStatus]:
  learners = status.learners if status else ()
  return {learner_name(learner.learner): learner for learner in learners}


def _row(
  process: ProcessState, learner: LearnerStatus | None, columns
) -> list[str | rich.text.Text]:
  shown = _state(process, learner)
  state = rich.text.Text(shown, style=STYLES.get(shown, ''))
  cells = ['' if learner is None else x.text_in(learner) for x in columns]
  return [process.name, state, *cells, str(process.starts)]


def _state(process: ProcessState, learner: LearnerStatus | None) -> str:
  """The syncer's word for a learner, unless its process does not run.

  One that has not said hello since its start compiles its programs.
  """
  if process.state != RUNNING or not process.name.startswith(LEARNER):
    return process.state
  if learner is not None and learner.state in (status.LIVE, status.JOINING):
    return learner.state
  hellos = (learner.incarnations or 0) if learner else 0
  return COMPILING if process.starts > hellos else learner.state


def report(
  workdir: Workdir,
  status: RunStatus,
  evaluation: Evaluation,
  plot: str,
  tokens: Collection[TokenCounts] = (),
) -> rich.console.Group:
  """Everything that a newcomer should see of a finished run.

  Args:
    plot: where the loss plot lies, or why there is none.
    tokens: the token ledger; none where no learner has an event log.
  """
  tables = (
    text_tables.losses(evaluation),
    _learners(status),
    _run(status, tokens),
    _places(workdir, plot),
  )
  return rich.console.Group(*(part for view in tables for part in ('', view)))


def _learners(status: RunStatus) -> rich.table.Table:
  columns = [*figures.shown(figures.LEARNER, figures.END)]
  return text_tables.table(
    'Learners',
    ('learner', *(column.label for column in columns)),
    [
      (learner_name(x.learner), *(column.text_in(x) for column in columns))
      for x in status.learners
    ],
  )


def _run(
  status: RunStatus, tokens: Collection[TokenCounts]
) -> rich.table.Table:
  rows = [
    (figure.label, figure.text_in(status))
    for figure in figures.shown(figures.RUN, figures.END)
  ]
  ledger = [('where tokens went', tokens_text(tokens))] if tokens else []
  returned = (
    (f'back again: {learner_name(each.learner)}', each.beginning)
    for each in status.learners
    if (each.incarnations or 0) > 1
  )
  return text_tables.table(
    'Run', ('', ''), (*rows, *ledger, *returned), left=2, header=False
  )


def tokens_text(rows: Collection[TokenCounts]) -> rich.text.Text:
  """Returns text on the tokens' whereabouts; unexplained ones are a defect."""
  text = rich.text.Text(token_ledger.shares(token_ledger.total(rows)))
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
