# SPDX-License-Identifier: Apache-2.0
"""The outputs of a lab run: results, progress bar, files in its folder.

Times are simulated seconds since the run began, not since the epoch. A
learner's record is written once its next step is done: the evaluation of a
boundary is part of the record of the step before it.
"""

import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.data import text_windows
from diloco.fleets.tally import Tally
from diloco.metrics import files, names
from diloco.metrics.run_progress import count
from diloco.metrics.token_ledger import TokenCounts
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import (
  JsonlWriter,
  MultiWriter,
  TensorBoardWriter,
  Writer,
)
from diloco.models import api, routing
from diloco.run.spec import RunSpec

Params = Mapping[str, np.ndarray]  # Path -> array.
REDRAWN_EVERY_S = 0.2
LINES = 10  # Per run, if there is no terminal.
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
    health: metrics of a mixture of experts, by name; see `diloco.lab.outputs`.
  """

  step: int
  tokens: int
  loss: float
  learners_loss: float
  at_s: float
  health: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trained:
  """The result of a run."""

  points: tuple[Point, ...]  # The last one is the end.
  steps: int  # Inner steps of all learners.
  rounds: int
  participation: float  # Mean share of the learners that a round merged.
  goodput: float  # Share of the learners' time that went into steps.
  parameters: dict[str, np.ndarray]
  tally: Tally  # Timeline data, if requested.
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
    """Called for what belongs on the syncer's tape."""

  def evaluated(self, point: Point):
    """Called after an evaluation of the model."""

  def close(self):
    """Called last."""


class LabObservers(LabObserver):
  """Forwards to several observers."""

  def __init__(self, observers: Sequence[LabObserver]):
    self._observers = tuple(observers)

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    for observer in self._observers:
      observer.happened(at_s, process, event, detail)

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    for observer in self._observers:
      observer.stepped(learner, step, scalars)

  def decided(self, at_s: float, kind: str, fields: Mapping):
    for observer in self._observers:
      observer.decided(at_s, kind, fields)

  def evaluated(self, point: Point):
    for observer in self._observers:
      observer.evaluated(point)

  def close(self):
    for observer in self._observers:
      observer.close()


class Recording(LabObserver):
  """Writes into an empty folder, or over an earlier run of the lab.

  Raises:
    ConfigError: the folder holds a run of processes.
  """

  def __init__(self, folder: pathlib.Path, config: RunConfig):
    workdir = Workdir(folder)
    self._hparams = run_config.flat(config)
    for other in (workdir.status, workdir.pids):
      if other.exists():
        raise ConfigError(
          [f'--workdir={folder}: holds a run of processes, see {other.name}']
        )
    for old in (workdir.tape, workdir.events):
      old.unlink(missing_ok=True)
    for old in (
      folder / 'metrics',
      folder / 'tensorboard',
      workdir.parameters,
    ):
      shutil.rmtree(old, ignore_errors=True)
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise ConfigError(
        [f'--workdir={folder}: no run can be kept there: {error}']
      ) from None
    files.write_json(workdir.config, config)
    self._workdir = workdir
    self._every = config.run.log_every_steps
    self._writers: dict[int, Writer] = {}
    # The last step of each learner: its number and scalars.
    self._last: dict[int, tuple[int, dict[str, float]]] = {}
    self._newest: int | None = None  # The learner with the latest step.
    self._tape = workdir.tape.open('w')
    self._events = workdir.events.open('w')

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    _write(
      self._events,
      {
        names.TIME: at_s,
        'process': process,
        'event': event,
        'detail': detail,
      },
    )

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    self._write_last(learner)
    self._last[learner] = step, dict(scalars)
    self._newest = learner

  def decided(self, at_s: float, kind: str, fields: Mapping):
    _write(self._tape, {names.TIME: at_s, 'kind': kind, **fields})

  def evaluated(self, point: Point):
    if self._newest is not None:
      self._last[self._newest][1][names.EVAL_LOSS] = point.loss

  def close(self):
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
      self._writers[learner] = MultiWriter(
        [
          JsonlWriter(self._workdir.metrics(name)),
          TensorBoardWriter(self._workdir.tensorboard(name), self._hparams),
        ]
      )
    return self._writers[learner]


def _write(file, line: Mapping):
  file.write(json.dumps(line) + '\n')
  file.flush()


class Health:
  """Routes one held-out batch through the models of a run.

  A model without experts has no metrics.
  """

  def __init__(self, run_spec: RunSpec):
    config = run_spec.config
    self._routing = None
    if run_spec.model.routing is None:
      return
    self._experts = config.model.experts
    text, seq_len = run_spec.text.heldout, config.data.seq_len
    rows, _ = text_windows.heldout_shape(
      text, seq_len, config.run.eval_batch, 1
    )
    (batch,) = text_windows.heldout_batches(text, seq_len, rows, 1)
    self._tokens = jnp.asarray(batch['tokens'][:, :-1])
    self._routing = jax.jit(
      lambda params, tokens: run_spec.model.routing(
        api.unflatten(params), tokens
      )
    )

  def of(
    self,
    theta: Params,
    learners: Sequence[Params] = (),
    spikes: Sequence[float] = (),
  ) -> dict[str, float]:
    """Returns the metrics by name; empty for a model without experts.

    Args:
      theta: the global model: how even the load is once all is merged.
      learners: live ones; of two or more it says how far they agree.
      spikes: the learners' `routing.loss_spike`.
    """
    if self._routing is None:
      return {}
    _, chosen = self._route(theta)
    told = {
      'post_sync_expert_utilisation_entropy': (
        routing.utilisation_entropy(chosen, self._experts)
      )
    }
    if len(learners) >= 2:
      probs, chosen = zip(*(self._route(each) for each in learners))
      told |= {
        'inter_replica_router_distance': routing.router_distance(learners),
        'top_k_routing_overlap': routing.top_k_overlap(np.stack(chosen)),
        'js_routing_divergence': routing.routing_divergence(np.stack(probs)),
      }
    finite = [spike for spike in spikes if np.isfinite(spike)]
    if finite:
      told['post_sync_loss_spike'] = float(np.mean(finite))
    return told

  def _route(self, params: Params) -> tuple[np.ndarray, np.ndarray]:
    placed = {path: jnp.asarray(x) for path, x in params.items()}
    probs, chosen = self._routing(placed, self._tokens)
    return np.asarray(probs), np.asarray(chosen)


class Bar(LabObserver):
  """A progress bar on standard error."""

  def __init__(
    self,
    learners: int,
    total_steps: int,
    console: rich.console.Console | None = None,
  ):
    self._console = console or rich.console.Console(stderr=True)
    self._total = total_steps
    self._states = {learner_name(m): DEAD for m in range(learners)}
    self._step = 0
    self._loss = self._held_out = float('nan')
    self._said = 0
    self._drawn_s = 0.0
    self._began_s: float | None = None  # When the first step was over.
    self._from = 0  # That step.
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
    if process in self._states:
      self._states[process] = LIVE if event == 'started' else DEAD

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    self._step = max(self._step, round(scalars[names.GLOBAL_STEP]))
    if self._began_s is None:
      self._began_s, self._from = time.monotonic(), self._step
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
    share = (step - self._from) / max(1, self._total - self._from)
    said = count(step, self._total, self._began_s or 0.0, share)
    self._console.print(
      f'step {said}  {self._text(at_s)}',
      highlight=False,
      soft_wrap=True,
    )

  def _text(self, at_s: float) -> str:
    states = ''.join(self._states.values())
    held_out = (
      f'  held out {self._held_out:.4f}'
      if self._held_out == self._held_out
      else ''
    )
    return f'loss {self._loss:.4f}{held_out}  {states}  {at_s:.0f} s simulated'
