# SPDX-License-Identifier: Apache-2.0
"""One training run in one process, on a simulated clock; the same bits again.

Decoupled DiLoCo is the real machines around real arrays. Data-parallel is the
same inner step on the batches of all learners at once; a learner alone is that
with one of them.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from diloco.lab.contents import LabContents
from diloco.lab.health import Health
from diloco.models import routing_health
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.device import Device
from diloco.runtime.heldout import Heldout
from diloco.sim import speeds
from diloco.sim.cluster import Cluster, Timing
from diloco.sim.tally import Tally

HORIZON_FACTOR = 100.0  # A run that takes so much longer than planned hangs.


@dataclasses.dataclass(frozen=True)
class Point:
  """Where a run stood.

  Attributes:
    step: t, the global step.
    tokens: trained by all learners.
    loss: of the global model on held-out text, nats per token.
    learners_loss: of the mean of the learners' parameters, likewise; NaN where
      there is none.
    at_s: simulated.
    health: of a mixture of experts, by name; see `diloco.lab.health`.
  """

  step: int
  tokens: int
  loss: float
  learners_loss: float
  at_s: float
  health: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trained:
  """What came of a run."""

  points: tuple[Point, ...]  # The last one is the end.
  steps: int  # Inner steps of all learners.
  rounds: int
  participation: float  # Mean share of the learners that a round merged.
  goodput: float  # Share of the learners' time that went into steps.
  parameters: dict[str, np.ndarray]
  tally: Tally  # What a timeline shows, as far as it was asked for.
  deaths: tuple[tuple[int, float, float], ...] = ()  # Learner, dies, is back.

  @property
  def loss(self) -> float:
    """At the end."""
    return self.points[-1].loss


def train(
  blueprint: Blueprint,
  tell: Callable[[int, float], None] = lambda *_: None,
  timeline_s: float = 0.0,
) -> Trained:
  """The run that the configuration describes.

  Args:
    blueprint: of the run; its section `lab` names the system.
    tell: takes the global step and a training loss, often.
    timeline_s: what happens before is kept for a picture, in `Trained.tally`.
  """
  if blueprint.config.lab.system == 'decoupled':
    return _Decoupled(blueprint, tell, timeline_s).run()
  learners = blueprint.config.protocol.learners
  if blueprint.config.lab.system == 'alone':
    learners = 1
  return _together(blueprint, learners, tell)


class _Decoupled:
  def __init__(
    self,
    blueprint: Blueprint,
    tell: Callable[[int, float], None],
    timeline_s: float,
  ):
    config = blueprint.config
    lab, learners = config.lab, config.protocol.learners
    rng = random.Random(config.seed)
    steps_s = speeds.mean_steps_s(
      learners, lab.step_s, lab.slow_learners, lab.slow_gap
    )
    self._config = config
    self._tell = tell
    self._heldout, self._health = Heldout(blueprint), Health(blueprint)
    self._tally = Tally(timeline_s)
    self._points: list[Point] = []
    self._deaths: list[tuple[int, float, float]] = []
    self._contents = LabContents(blueprint, _device(blueprint))
    self._cluster = Cluster(
      config.protocol,
      Timing(
        dict(enumerate(steps_s)),
        latency_s=lab.latency_s,
        transfer_s=lab.transfer_s,
        encode_s=0.01 * lab.step_s,
        merge_s=0.01 * lab.step_s,
      ),
      config.seed,
      watch=self._tally,
      checkpoint_rounds=config.checkpoint.syncer_every_rounds,
      speeds={
        m: speeds.Speeds(
          step_s, lab.jitter, 0.0, random.Random(rng.random())
        ).next_s
        for m, step_s in enumerate(steps_s)
      },
      tokens_per_step=config.data.batch * config.data.seq_len,
      contents=self._contents,
    )
    self._schedule_deaths(random.Random(rng.random()))

  def run(self) -> Trained:
    cluster, protocol = self._cluster, self._config.protocol
    for learner in range(protocol.learners):
      cluster.start(learner)
    horizon_s = (
      HORIZON_FACTOR
      * protocol.total_steps
      * max(cluster.timing.step_s.values())
    )
    for target in self._targets():
      cluster.sim.run(
        horizon_s, stop=lambda t=target: cluster.ended or self._step() >= t
      )
      assert cluster.sim.now < horizon_s, f'hangs at step {self._step()}'
      self._look()
    cluster.sim.run(horizon_s, stop=lambda: cluster.ended is not None)
    assert cluster.ended, f'hangs at step {self._step()}'
    self._look()
    counts = self._tally.learners.values()
    learner_s = protocol.learners * cluster.sim.now
    rounds = self._tally.rounds
    return Trained(
      points=tuple(self._points),
      steps=sum(count.steps for count in counts),
      rounds=rounds,
      participation=self._tally.participants / (rounds * protocol.learners),
      goodput=sum(count.useful_s for count in counts) / learner_s,
      parameters=cluster.syncer.contents.model.parameters(),
      tally=self._tally,
      deaths=tuple(self._deaths),
    )

  def _targets(self) -> Iterator[int]:
    every = self._config.lab.eval_every_steps
    if every:
      yield from range(every, self._config.protocol.total_steps, every)

  def _step(self) -> int:
    return self._cluster.syncer.machine.step

  def _look(self):
    alive = [
      process.contents
      for process in self._cluster.learners.values()
      if process.alive
    ]
    learners = [contents.params for contents in alive]
    mean = {
      path: np.mean([np.asarray(x[path]) for x in learners], axis=0)
      for path in (learners[0] if learners else ())
    }
    theta = self._cluster.syncer.contents.model.parameters()
    point = Point(
      step=self._step(),
      tokens=self._tally.tokens,
      loss=self._heldout.loss(theta),
      learners_loss=self._heldout.loss(mean) if mean else float('nan'),
      at_s=self._cluster.sim.now,
      health=self._health.of(
        theta,
        learners,
        [routing_health.loss_spike(x.losses, x.applied) for x in alive],
      ),
    )
    self._points.append(point)
    self._tell(point.step, point.loss)

  def _schedule_deaths(self, rng: random.Random):
    """Of each learner a Poisson process; the next begins once it is back."""
    lab, cluster = self._config.lab, self._cluster
    if not lab.mtbf_steps:
      return

    def live(learner: int, from_s: float):
      dies_s = from_s + lab.step_s * rng.expovariate(1 / lab.mtbf_steps)
      back_s = dies_s + lab.step_s * lab.away_steps
      cluster.sim.at(dies_s, lambda: die(learner, dies_s, back_s))
      cluster.sim.at(back_s, lambda: come_back(learner, back_s))

    def die(learner: int, dies_s: float, back_s: float):
      if not cluster.learners[learner].gone:
        cluster.kill(learner)
        self._deaths.append((learner, dies_s, back_s))

    def come_back(learner: int, now_s: float):
      if cluster.learners[learner].gone and not cluster.ended:
        cluster.start(learner)
      live(learner, now_s)

    for learner in range(self._config.protocol.learners):
      live(learner, 0.0)


def _together(
  blueprint: Blueprint, learners: int, tell: Callable[[int, float], None]
) -> Trained:
  """Data-parallel: one step on the batches that `learners` learners have."""
  config = blueprint.config
  data = dataclasses.replace(config.data, batch=learners * config.data.batch)
  blueprint = dataclasses.replace(
    blueprint, config=dataclasses.replace(config, data=data)
  )
  device, heldout = _device(blueprint), Heldout(blueprint)
  health = Health(blueprint)
  schedule = blueprint.schedule()
  shards = [
    dataclasses.replace(blueprint, config=config).dataset(learner)
    for learner in range(learners)
  ]
  params, inner = device.init(blueprint.initial_parameters())
  points: list[Point] = []

  def look(step: int):
    loss = heldout.loss(params)
    tokens = step * device.tokens_per_step
    at_s = step * config.lab.step_s
    points.append(
      Point(step, tokens, loss, float('nan'), at_s, health.of(params))
    )
    tell(step, loss)

  every = config.lab.eval_every_steps
  for step in range(config.protocol.total_steps):
    rows = [shard[step]['tokens'] for shard in shards]
    batch = device.put_batch({'tokens': np.concatenate(rows)})
    params, inner, _ = device.step(
      params, inner, batch, schedule(step), (0, step)
    )
    done = step + 1
    if every and done % every == 0 and done < config.protocol.total_steps:
      look(done)
  look(config.protocol.total_steps)
  return Trained(
    points=tuple(points),
    steps=config.protocol.total_steps,
    rounds=0,
    participation=1.0,
    goodput=1.0,
    parameters={path: np.asarray(x) for path, x in params.items()},
    tally=Tally(),
  )


def _device(blueprint: Blueprint) -> Device:
  """On as many devices as the mesh asks for: here others may be left over."""
  mesh = blueprint.config.mesh
  return Device(blueprint, jax.devices()[: mesh.devices])
