# SPDX-License-Identifier: Apache-2.0
"""A run as a value: its losses, events, timeline, parameters, configuration.

All of it is read from the run's folder by `diloco.metrics.recorded_run`, anew
where the run goes on.
"""

import os
import pathlib
import tempfile
from typing import TYPE_CHECKING

from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.data.tokenizers import Tokenizer, make_tokenizer
from diloco.metrics import recorded_run
from diloco.metrics.recorded_run import FollowedRun, RecordedRun
from diloco.metrics.workdir import Workdir
from diloco.pages.parts import ReportPage
from diloco.watch import run_page
from diloco.watch.folders import FollowedFolders

if TYPE_CHECKING:  # They take a second or two to import, and are rarely read.
  import numpy as np

  from diloco.replay.timeline import TimelineRow


class Run:
  """A run in its folder, over or going on; made by `open_run`.

  Every property reads what has been written since the last one. In a notebook
  the run shows itself: the page of `diloco report`, with a timeline that plays.

  Attributes:
    folder: where it lies.

  Raises:
    NoReport: a ValueError: the folder holds no run; names it.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    kept_while_used: tempfile.TemporaryDirectory | None = None,
  ):
    self.folder = folder
    self._kept_while_used = kept_while_used
    self._followed = FollowedRun(folder, whole=True)

  def _read(self) -> FollowedRun:
    self._followed.update()
    return self._followed

  @property
  def config(self) -> RunConfig:
    """The checked configuration; `config.protocol.learners` and so on."""
    return run_config.restore(self._followed.config)

  @property
  def recorded(self) -> RecordedRun:
    """All that the folder says: rounds, steps, deaths, goodput, uptime."""
    return recorded_run.record(self._read())

  @property
  def losses(self) -> tuple[tuple[float, float, float], ...]:
    """(seconds since the first learner was ready, global step, loss) of Θ.

    The loss is that of the global model on held-out text, in nats per token;
    (0, 0, loss) is that of the initial parameters, where it was evaluated.
    """
    return self.recorded.heldout

  @property
  def loss(self) -> float:
    """The last of `losses`, in nats per token; NaN: none was evaluated yet."""
    return self.losses[-1][2] if self.losses else float('nan')

  @property
  def learner_losses(self) -> dict[int, tuple[tuple[float, float], ...]]:
    """(seconds, training loss in nats per token) by learner id.

    Of long runs each point is the mean of several steps.
    """
    run = self._read()
    return {
      m: tuple((at_s - run.begin_s, loss) for at_s, loss in each.loss.points())
      for m, each in enumerate(run.learners.values())
    }

  @property
  def goodput(self) -> float | None:
    """Share of the learners' time that went into steps that count."""
    run = self._read()
    return run.status.goodput if run.status else run.counted_goodput()

  @property
  def tokens(self) -> int:
    """Tokens that all learners have trained on, as they reported them."""
    return round(sum(x.tokens for x in self._read().learners.values()))

  @property
  def events(self) -> 'list[TimelineRow]':
    """Rounds, joins, deaths and decisions in the order of time.

    Each has `time_s` since the first of them, `kind` ('round', 'joined',
    'lost', …), `who`, `learners` and `words`. These are the rows of `diloco
    tape`, those of the learners' own logs included.
    """
    from diloco.replay import timeline
    from diloco.run.event_log import read_tapes

    return timeline.timeline_rows(read_tapes(Workdir(self.folder)))

  @property
  def parameters(self) -> 'dict[str, np.ndarray]':
    """The final parameters of the global model: path -> f32 array.

    Raises:
      FileNotFoundError: the run has not written any (yet).
    """
    from diloco.checkpoint.parameters import read_parameters

    return read_parameters(Workdir(self.folder).parameters)

  @property
  def tokenizer(self) -> Tokenizer:
    """The run's tokenizer: bytes to tokens and back.

    Raises:
      FileNotFoundError: its file is no longer there.
    """
    data = self.config.data
    return make_tokenizer(data.tokenizer, data.end_token)

  def timeline(self) -> ReportPage:
    """Returns the lanes of learners, syncer and rounds; in a notebook it plays.

    `timeline().parts[0]` has the spans as values, in seconds.
    """
    run = self._read()
    part = run_page.timeline(run, 'timeline', run.setup.name)
    name = run.setup.name
    return ReportPage(name, name, command='', paragraphs=(), parts=(part,))

  def page(self) -> ReportPage:
    """Returns the page of `diloco report`: charts, deaths, figures, tables."""
    command = f'diloco report {self.folder}'
    return FollowedFolders([self.folder], command).page()

  def __repr__(self) -> str:
    run = self._read()
    step = run.status.step if run.status else 0
    return (
      f'Run({str(self.folder)!r}: {run.state()}, step {step} of '
      f'{run.setup.total_steps}, loss {self.loss:.4g})'
    )

  def _repr_html_(self) -> str:
    return self.page()._repr_html_()


def open_run(folder: str | os.PathLike) -> Run:
  """Opens the folder of a run, of processes or of the lab, over or going on.

  Args:
    folder: the `workdir` of `train`, `lab`, `diloco train`, … The folder is
      only read: the run does not notice.

  Raises:
    NoReport: a ValueError: there is no such folder, or it holds no run.
  """
  return Run(pathlib.Path(folder))
