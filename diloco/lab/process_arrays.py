# SPDX-License-Identifier: Apache-2.0
"""The contents of the lab's processes: arrays, codecs and steps of a real run.

It uses the functions of the runtime's processes, without their threads and
transports: payloads are passed by reference.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diloco.config.run_config import RunConfig
from diloco.data import pipeline
from diloco.learner.local_delta import LocalDelta
from diloco.learner.programs import LearnerKinds, LearnerPrograms
from diloco.learner.replica import FragmentReplica, Mismatch, whole_replica
from diloco.numerics import outer, payload
from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.syncer import events as syncer_events
from diloco.run import payload_parts
from diloco.run.spec import RunSpec
from diloco.simulator.contents import RefusedContribution
from diloco.syncer.outer_state import OuterState, OuterStep

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


@dataclasses.dataclass(frozen=True)
class Donated:
  """The state that a newcomer gets from a donor."""

  held: list[FragmentReplica]  # Θ, by fragment.
  inner: Any  # The inner optimizer's state, on the host.


@dataclasses.dataclass(frozen=True)
class SavedLearner:
  """A learner's own checkpoint, on the host."""

  params: dict[str, np.ndarray]
  inner: Any
  bases: list[Arrays]


@dataclasses.dataclass(frozen=True)
class Beginning:
  """The parameters and moments with which all learners begin, on the host.

  Attributes:
    inner: None: a fresh state of the inner optimizer.
    steps: steps of each learner's rows that led there.
  """

  params: dict[str, np.ndarray]
  inner: Any = None
  steps: int = 0


class ArrayBackend:
  """Makes the contents; learners of one kind share their compiled programs.

  Args:
    configs: of the learners, by id.
    beginning: where the learners begin.
  """

  def __init__(
    self, run_spec: RunSpec, configs: Sequence[RunConfig], beginning: Beginning
  ):
    self.run_spec = run_spec
    self.beginning = beginning
    self._configs = configs
    self._kinds = LearnerKinds(run_spec)
    self.first = run_spec.fragments_of(beginning.params)
    self.first_crcs = tuple(
      payload.crc(theta, pieces)
      for theta, pieces in zip(self.first, run_spec.layout.fragments)
    )

  def learner(
    self, learner: int, start: Start, saved: SavedLearner | None
  ) -> 'LearnerArrays':
    """Makes a learner's contents; see `diloco.simulator.contents.Backend`."""
    run_spec, programs = self._kinds.of(self._configs[learner])
    if saved is None:
      params, inner = programs.init(self.beginning.params)
      if self.beginning.inner is not None:
        inner = on_device(self.beginning.inner, programs.state_like)
      bases = self.first
    else:
      params = on_device(saved.params, programs.params_like)
      inner = on_device(saved.inner, programs.state_like)
      bases = saved.bases
    before = self.beginning.steps
    return LearnerArrays(
      run_spec, programs, learner, start, params, inner, bases, before
    )

  def syncer(self, crcs: tuple[int, ...], saved: list | None) -> 'SyncerArrays':
    """Makes the syncer's contents; see `diloco.simulator.contents.Backend`."""
    model = OuterState(self.run_spec)
    first = (outer.init(theta, self.run_spec.outer) for theta in self.first)
    for p, state in enumerate(saved or first):
      model.restore(p, state)
    assert model.crcs() == crcs, f'{model.crcs()=}, {crcs=}'
    return SyncerArrays(self.run_spec, model)


class LearnerArrays:
  """An implementation of `diloco.simulator.contents.LearnerBackend`."""

  def __init__(
    self,
    run_spec: RunSpec,
    programs: LearnerPrograms,
    learner: int,
    start: Start,
    params: dict[str, jax.Array],
    inner: Any,
    bases: list[Arrays],
    before: int,
  ):
    self._learner = learner
    self._before = before  # Steps before its first one.
    self._run_spec = run_spec
    self._programs = programs
    self._params = params
    self._inner = inner
    blend = run_spec.config.protocol.blend
    self._own = LocalDelta(programs, blend, dict(enumerate(bases)), params)
    self.base_crcs = list(start.crcs)
    self._host = whole_replica(run_spec, bases, start.versions)
    self._feedback = (
      UpFeedback(run_spec) if run_spec.config.lab.up_feedback else None
    )
    self._donated: Donated | None = None
    self._schedule = run_spec.schedule()
    self._dataset = run_spec.dataset(learner)

  @property
  def versions(self) -> list[int]:
    return [held.version for held in self._host.held()]

  @property
  def crcs(self) -> list[int]:
    return list(self._host.crcs())

  @property
  def params(self) -> dict[str, jax.Array]:
    """θ, path -> array; the next step donates the arrays."""
    return self._params

  def step(self, rows: int, progress: int) -> float:
    size = self._run_spec.config.data.batch
    rows += self._before * size
    progress = self._run_spec.progress(progress + self._before, rows // size)
    batch = pipeline.batch_at(self._dataset, rows, size)
    self._params, self._inner, metrics = self._programs.step(
      self._params,
      self._inner,
      self._programs.put_batch(batch),
      self._schedule(progress),
      (self._learner, rows),
    )
    return float(metrics['loss'])

  def kept(self, p: int) -> tuple[int, ...]:
    """Returns handles of the offers of which a copy is kept."""
    return self._own.handles(p)

  def snapshot(self, effect: learner_events.Snapshot) -> tuple[dict, Arrays]:
    p = effect.fragment
    theta = self._own.snapshot(p, self._params, effect.handle, effect.keep)
    return theta, self._own.reference(p)

  def offer(self, effect: learner_events.Snapshot, copy) -> np.ndarray:
    theta, reference = copy
    if self._feedback:
      return self._feedback.encode(effect, reference, theta)
    pieces = self._run_spec.layout.fragments[effect.fragment]
    return payload_parts.encode(reference, theta, pieces, self._run_spec.up)

  def donate(self) -> Donated:
    return Donated(self._host.held(), on_host(self._inner))

  def adopt(self, offered: messages.StateOffered, donated: Donated):
    self._host.take_over(donated.held)
    self._donated = donated

  def adopt_inner(self):
    self._inner = on_device(self._donated.inner, self._programs.state_like)
    self._donated = None

  def reset_inner(self):
    self._inner = self._programs.fresh_state(self._params)

  def update(self, p: int, version: int, data, crc: int) -> str | None:
    parts = self._run_spec.owners.parts(data, p)
    return self._taken_in(self._host.update, p, version, parts, crc)

  def replace(self, p: int, version: int, data, crc: int) -> str | None:
    parts = self._run_spec.owners.parts(data, p)
    return self._taken_in(self._host.replace, p, version, parts, crc)

  def _taken_in(self, take_in, *what) -> str | None:
    try:
      take_in(*what)
    except Mismatch as error:
      return str(error)
    return None

  def apply(self, effect: learner_events.Apply, training: bool):
    p = effect.fragment
    held = self._host.held()[p]
    self.base_crcs[p] = held.crc
    if self._feedback:
      self._feedback.merged(p, effect.handle)
    placed = self._programs.put_fragment(p, held.theta)
    self._params = self._own.take_in(
      p, self._params, held.theta, placed, effect, training
    )

  def fragment(self, p: int) -> np.ndarray:
    theta = self._host.held()[p].theta
    pieces = self._run_spec.layout.fragments[p]
    return payload.encode(theta, pieces, self._run_spec.full)

  def save(self) -> SavedLearner:
    bases = [self._own.bases[p] for p in sorted(self._own.bases)]
    return SavedLearner(on_host(self._params), on_host(self._inner), bases)


class UpFeedback:
  """Adds what a merged offer of a fragment did not send to its next ones."""

  def __init__(self, run_spec: RunSpec):
    self._run_spec = run_spec
    self._residuals: dict[int, Arrays] = {}  # Of the last merged offers.
    # Of offers that may still be merged, by fragment and handle.
    self._unsent: dict[tuple[int, int], Arrays] = {}

  def encode(
    self, snapshot: learner_events.Snapshot, reference: Arrays, theta: Arrays
  ) -> np.ndarray:
    """Returns the bytes of reference − θ + residual."""
    p, up = snapshot.fragment, self._run_spec.up
    pieces = self._run_spec.layout.fragments[p]
    if p in self._residuals:
      reference = outer.add(on_host(reference), self._residuals[p])
    data = payload_parts.encode(reference, theta, pieces, up)
    sent, _ = payload_parts.decode(data, pieces, up)
    self._unsent[p, snapshot.handle] = {
      name: np.asarray(reference[name]) - np.asarray(theta[name]) - x
      for name, x in sent.items()
    }
    return data

  def merged(self, p: int, handle: int):
    """Notes which offer was merged; handles ascend, 0 is none."""
    if (p, handle) not in self._unsent:
      return
    self._residuals[p] = self._unsent[p, handle]
    for q, old in [*self._unsent]:
      if q == p and old <= handle:
        del self._unsent[q, old]


class SyncerArrays:
  """An implementation of `diloco.simulator.contents.SyncerBackend`."""

  def __init__(self, run_spec: RunSpec, model: OuterState):
    self.model = model
    self._run_spec = run_spec
    self._merged: dict[int, OuterStep] = {}  # By fragment.

  @property
  def crcs(self) -> list[int]:
    return list(self.model.crcs())

  def take(self, offer: messages.Offer) -> tuple[Arrays, float]:
    return self.decode(offer.fragment, offer.payload.data)

  def decode(self, p: int, data: np.ndarray) -> tuple[Arrays, float]:
    """Returns a contribution and its norm from the bytes alone."""
    pieces = self._run_spec.layout.fragments[p]
    try:
      return payload_parts.decode(data, pieces, self._run_spec.up)
    except payload_parts.Unusable as error:
      raise RefusedContribution(str(error)) from None

  def merged(self, p: int) -> OuterStep:
    """Returns the result of the fragment's last merge, to be published."""
    return self._merged[p]

  def merge(self, merge: syncer_events.Merge, taken: dict[int, Arrays]):
    weights = {share.learner: share.weight for share in merge.shares}
    self._merged[merge.fragment] = self.model.outer_step(
      merge.fragment, taken, weights
    )

  def publish(self, p: int, version: int) -> np.ndarray:
    outcome = self._merged.pop(p)
    self.model.install(p, outcome)
    return outcome.data

  def fragment(self, p: int) -> np.ndarray:
    return self.model.fragment(p)[1]

  def take_fragment(self, p: int, version: int, data, crc: int):
    pieces = self._run_spec.layout.fragments[p]
    self.model.go_on(
      p, version, payload.decode(data, pieces, self._run_spec.full)
    )

  def relabel(self, p: int, version: int):
    self.model.go_on(p, version, None)

  def save(self) -> list:
    return [self.model.state(p) for p in range(len(self.crcs))]


def on_host(tree: Any) -> Any:
  """Copies the arrays of a tree to the host."""
  return jax.tree.map(np.array, tree)


def on_device(tree: Any, likes: Any) -> Any:
  """Puts arrays where those of `likes` lie; copies, as a step donates them."""
  return jax.tree.map(
    lambda x, like: jax.device_put(np.array(x), like.sharding), tree, likes
  )
