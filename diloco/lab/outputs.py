# SPDX-License-Identifier: Apache-2.0
"""The outputs of a lab run: results, progress bar, files in its folder.

Times are simulated seconds since the run began, not since the epoch. A
learner's record is written once its next step is done: the evaluation of a
boundary is part of the record of the step before it.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco.config import pretrained, run_config
from diloco.config.lab_section import Kill
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.fleets.tally import Tally
from diloco.lab.checkpoints import LabCheckpoints
from diloco.metrics import files, names
from diloco.metrics.run_progress import ProgressLine, count
from diloco.metrics.token_ledger import TokenCounts
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import VIEWS, Writer, process_writer
from diloco.run.heldout import Heldout, mean_loss
from diloco.run.spec import RunSpec

LIVE, DEAD = '●', '○'


@dataclasses.dataclass(frozen=True)
class Point:
  """One evaluation of a run.

  Attributes:
    step: t, the global step; for data-parallel, steps of as many tokens as all
      learners have.
    tokens: tokens trained by all learners.
    loss: loss of the global model on held-out text, nats per token.
    learners_loss: loss of the mean of the learners' parameters, nats per token;
      NaN if there is none.
    average_loss: loss of the average over `lab.average_fraction`; NaN if there
      is none.
    halves: of these losses by name, those on either half of the held-out text;
      at the end of the run.
  """

  step: int
  tokens: int
  loss: float
  at_s: float
  learners_loss: float = float('nan')
  average_loss: float = float('nan')
  halves: Mapping[str, tuple[float, float]] = dataclasses.field(
    default_factory=dict
  )


@dataclasses.dataclass(frozen=True)
class Trained:
  """The result of a run."""

  points: tuple[Point, ...]  # The last one is the end.
  steps: int  # Inner steps of all learners.
  rounds: int
  participation: float  # Mean share of the learners that a round merged.
  goodput: float  # Share of the learners' time that went into steps.
  parameters: dict[str, np.ndarray]
  tally: Tally
  deaths: tuple[tuple[int, float, float], ...] = ()  # (learner, death, return).
  merged_tokens: int = 0  # Included in Θ and not lost since.
  tokens: TokenCounts | None = None  # Sum over learners and fragments.
  unexplained_tokens: int | None = None  # See `metrics.token_ledger`.
  # Over what was merged, see `metrics.ages`; None if nothing was.
  age_steps: float | None = None
  old_share: float | None = None

  @property
  def loss(self) -> float:
    """The final loss of the global model."""
    return self.points[-1].loss


class LabObserver:
  """An observer that ignores everything.

  Times are simulated seconds; processes are 'syncer' and 'learner-N'.
  """

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    """Called when a process 'started', was 'killed' or was told to leave.

    The event is 'stopped' in the last case.
    """

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    """Called after an inner step; names are those of `metrics.names`."""

  def decided(self, at_s: float, kind: str, fields: Mapping):
    """Called for what belongs in the syncer's event log."""

  def evaluated(self, point: Point):
    """Called after an evaluation of the model."""

  def place(self) -> dict[str, Any]:
    """Returns how far it is, by name, for a run that resumes from here."""
    return {}

  def close(self):
    """Called last."""


class Recording(LabObserver):
  """Writes into an empty folder, or over an earlier run of the lab.

  Args:
    place: of the checkpoint from which a run resumes: what was written since
      is removed. None: all of it is.
    shown: what shows the run as it goes.

  Raises:
    ConfigError: the folder holds a run of processes, or lacks what the run had
      written by its checkpoint.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    config: RunConfig,
    place: Mapping[str, Any] | None = None,
    shown: LabObserver | None = None,
  ):
    workdir = Workdir(folder)
    self._shown = shown or LabObserver()
    self._hparams = run_config.flat(config)
    for other in (workdir.status, workdir.pids):
      if other.exists():
        raise ConfigError(
          f'--workdir={folder}: holds a run of processes, see {other.name}'
        )
    self._workdir = workdir
    self._cut(place['sizes'] if place else {})
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise ConfigError(
        f'--workdir={folder}: no run can be kept there: {error}'
      ) from None
    files.write_json(workdir.config, config)
    if source := pretrained.of_model(config.model):
      source.keep_files(workdir.pretrained)
    self._every = config.run.log_every_steps
    self._writers: dict[int, Writer] = {}
    # The last step of each learner: its number and scalars.
    self._last: dict[int, tuple[int, dict[str, float]]] = {}
    self._newest: int | None = None  # The learner with the latest step.
    if place:
      self._last, self._newest = place['last'], place['newest']
    self._tape = workdir.tape.open('a')
    self._events = workdir.events.open('a')

  def place(self) -> dict[str, Any]:
    sizes = {path.name: path.stat().st_size for path in self._growing()}
    return {'sizes': sizes, 'last': self._last, 'newest': self._newest}

  def _growing(self) -> list[pathlib.Path]:
    workdir = self._workdir
    metrics = sorted((workdir.root / 'metrics').glob('*'))
    found = workdir.tape, workdir.events, *metrics
    return [path for path in found if path.exists()]

  def _cut(self, sizes: Mapping[str, int]):
    """Cuts the files to these sizes, and removes all others."""
    workdir = self._workdir
    for old in (*VIEWS, 'parameters'):
      shutil.rmtree(workdir.root / old, ignore_errors=True)
    by_name = {path.name: path for path in self._growing()}
    for name, path in by_name.items():
      if name not in sizes:
        path.unlink()
    for name, size in sizes.items():
      if name not in by_name or by_name[name].stat().st_size < size:
        raise ConfigError(
          f'--workdir={workdir.root}: {name} is shorter than at the '
          'checkpoint: remove checkpoints/lab to begin anew'
        )
      os.truncate(by_name[name], size)

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    self._shown.happened(at_s, process, event, detail)
    _write(
      self._events,
      {names.TIME: at_s, 'process': process, 'event': event, 'detail': detail},
    )

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    self._shown.stepped(learner, step, scalars)
    self._write_last(learner)
    self._last[learner] = step, dict(scalars)
    self._newest = learner

  def decided(self, at_s: float, kind: str, fields: Mapping):
    _write(self._tape, {names.TIME: at_s, 'kind': kind, **fields})

  def evaluated(self, point: Point):
    self._shown.evaluated(point)
    if self._newest is not None:
      self._last[self._newest][1][names.EVAL_LOSS] = point.loss

  def close(self):
    self._shown.close()
    for learner in sorted(self._last):
      self._write_last(learner, always=True)
    for writer in self._writers.values():
      writer.close()
    self._tape.close()
    self._events.close()

  def _write_last(self, learner: int, always: bool = False):
    step, scalars = self._last.get(learner, (0, {}))
    if scalars and (
      always or step % self._every == 0 or names.EVAL_LOSS in scalars
    ):
      self._writer(learner).write_scalars(step, scalars)

  def _writer(self, learner: int) -> Writer:
    if learner not in self._writers:
      name = learner_name(learner)
      self._writers[learner] = process_writer(
        self._workdir, name, self._hparams, views_anew=True
      )
    return self._writers[learner]


def _write(file, line: Mapping):
  file.write(json.dumps(line) + '\n')
  file.flush()


SHARED = '_points', '_average', '_averaged'  # What checkpoints of all keep.


class LabRun:
  """The evaluations and saves that runs of all systems share.

  A subclass has `_tally`, `_step` and `_now_s`, and gives its parameters.

  Args:
    timeline_s: events before this time are kept for a picture.
  """

  # What a checkpoint keeps as it is, besides the observer's place.
  _KEPT: tuple[str, ...] = ()

  def __init__(
    self,
    run_spec: RunSpec,
    kills: Sequence[Kill],
    timeline_s: float,
    observer: LabObserver,
    checkpoints: LabCheckpoints,
  ):
    self._config = run_spec.config
    self._kills = list(kills)
    self._observer = observer
    self._checkpoints = checkpoints
    self._heldout = Heldout(run_spec)
    self._whole = Heldout(run_spec, run_spec.config.lab.final_eval_batches)
    self._points: list[Point] = []
    self._average: dict[str, np.ndarray] = {}  # Path -> sum, f64.
    self._averaged = 0  # Number of global steps in that sum.
    self._set_up(run_spec, timeline_s)

  def _set_up(self, run_spec: RunSpec, timeline_s: float):
    """Makes what a system has of its own."""
    raise NotImplementedError

  def _parameters(self) -> Mapping[str, Any]:
    """Returns those of the global model, path -> array."""
    raise NotImplementedError

  def _learners_mean(self) -> Mapping[str, Any]:
    """Returns the mean of the learners' parameters; empty: there is none."""
    return {}

  def _average_from(self) -> int:
    """Returns the global step after which parameters are averaged."""
    total = self._config.protocol.total_steps
    return total - round(self._config.lab.average_fraction * total)

  def _add_to_average(self):
    """Adds the parameters of the global step that was just reached."""
    self._averaged += 1
    for path, array in self._parameters().items():
      sum_ = self._average.get(path, 0.0)
      self._average[path] = sum_ + np.asarray(array, np.float64)

  def _look(self, final: bool = False):
    """Evaluates; at the end on `lab.final_eval_batches` of the text."""
    models = {
      'loss': self._parameters(),
      'learners_loss': self._learners_mean(),
    }
    if final and self._averaged:
      models['average_loss'] = {
        path: np.asarray(sum_ / self._averaged, np.float32)
        for path, sum_ in self._average.items()
      }
    heldout = self._whole if final else self._heldout
    losses = {name: heldout.losses(x) for name, x in models.items() if x}
    point = Point(
      step=self._step,
      tokens=self._tally.tokens,
      at_s=self._now_s,
      **{name: mean_loss(each) for name, each in losses.items()},
      halves={name: _halves(x) for name, x in losses.items()} if final else {},
    )
    self._points.append(point)
    self._observer.evaluated(point)

  def _state(self) -> dict[str, Any]:
    kept = {name: getattr(self, name) for name in (*SHARED, *self._KEPT)}
    return kept | {'observer': self._observer.place()}

  def _go_on(self, state: dict[str, Any]):
    for name in (*SHARED, *self._KEPT):
      setattr(self, name, state[name])


def _halves(losses: np.ndarray) -> tuple[float, float]:
  """Returns the losses on the first and on the second half of the text."""
  middle = len(losses) // 2
  if not middle:
    return (float('nan'),) * 2
  return mean_loss(losses[:middle]), mean_loss(losses[middle:])


class ShownProgress(LabObserver):
  """Says how far the run is, on a line; an evaluation leaves one.

  Args:
    line: None: on standard error.
  """

  def __init__(
    self, learners: int, total_steps: int, line: ProgressLine | None = None
  ):
    self._total = total_steps
    self._states = {learner_name(m): DEAD for m in range(learners)}
    self._step, self._loss = 0, float('nan')
    self._began_s: float | None = None  # When the first step was over.
    self._from = 0  # That step.
    self._line = line or ProgressLine()
    self._line.__enter__()

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    if process in self._states:
      self._states[process] = LIVE if event == 'started' else DEAD

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    self._step = max(self._step, round(scalars[names.GLOBAL_STEP]))
    if self._began_s is None:
      self._began_s, self._from = time.monotonic(), self._step
    self._loss = scalars[names.TRAIN_LOSS]
    self._line.say(self._text(scalars[names.TIME]))

  def evaluated(self, point: Point):
    held_out = f'  held out {point.loss:.4f}'
    self._line.stay(self._text(point.at_s, held_out))

  def close(self):
    self._line.__exit__()

  def _text(self, at_s: float, held_out: str = '') -> str:
    step = min(self._step, self._total)
    share = (step - self._from) / max(1, self._total - self._from)
    line = count(step, self._total, self._began_s or 0.0, share)
    states = ''.join(self._states.values())
    return (
      f'step {line}  loss {self._loss:.4f}{held_out}  {states}  '
      f'{at_s:.0f} s simulated'
    )
