# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a lab run: a bar on a terminal, otherwise lines."""

import time
from collections.abc import Mapping

import rich.console
import rich.progress

from diloco.lab.journal import Journal
from diloco.lab.trained import Point
from diloco.metrics import names
from diloco.metrics.workdir import learner_name

REDRAWN_EVERY_S = 0.2
LINES = 10  # Per run, if there is no terminal.
LIVE, DEAD = '●', '○'


class Bar(Journal):
  """A progress bar on standard error.

  Args:
    learners: number of learners.
    total_steps: t at the end.
    console: the terminal; None: found automatically.
  """

  def __init__(
    self,
    learners: int,
    total_steps: int,
    console: rich.console.Console | None = None,
  ):
    self._console = console or rich.console.Console(stderr=True)
    self._total = total_steps
    self._lives = {learner_name(m): DEAD for m in range(learners)}
    self._step = 0
    self._loss = self._held_out = float('nan')
    self._said = 0
    self._drawn_s = 0.0
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn('{task.description}'),
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TextColumn('{task.fields[said]}'),
      rich.progress.TimeRemainingColumn(),
      console=self._console,
      auto_refresh=False,
    )
    self._task = self._bar.add_task('step', total=total_steps, said='')
    if self._console.is_terminal:
      self._bar.start()

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    if process in self._lives:
      self._lives[process] = LIVE if event == 'started' else DEAD

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    self._step = max(self._step, round(scalars[names.GLOBAL_STEP]))
    self._loss = scalars[names.TRAIN_LOSS]
    if not self._console.is_terminal:
      tenth = min(self._step * LINES // self._total, LINES)
      if tenth > self._said:
        self._said = tenth
        self._line(scalars[names.TIME])
      return
    now_s = time.monotonic()
    if now_s - self._drawn_s >= REDRAWN_EVERY_S:
      self._drawn_s = now_s
      self._draw(scalars[names.TIME])

  def evaluated(self, point: Point):
    self._held_out = point.loss
    if self._console.is_terminal:
      self._draw(point.at_s)
    else:
      self._line(point.at_s)

  def close(self):
    if self._console.is_terminal:
      self._bar.stop()

  def _draw(self, at_s: float):
    step = min(self._step, self._total)
    self._bar.update(self._task, completed=step, said=self._text(at_s))
    self._bar.refresh()

  def _line(self, at_s: float):
    step = min(self._step, self._total)
    self._console.print(
      f'step {step}/{self._total}  {self._text(at_s)}',
      highlight=False,
      soft_wrap=True,
    )

  def _text(self, at_s: float) -> str:
    lives = ''.join(self._lives.values())
    held_out = (
      f'  held out {self._held_out:.4f}'
      if self._held_out == self._held_out
      else ''
    )
    return f'loss {self._loss:.4f}{held_out}  {lives}  {at_s:.0f} s simulated'
