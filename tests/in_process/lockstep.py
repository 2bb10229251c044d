# SPDX-License-Identifier: Apache-2.0
"""Real machines, numerics and train step in one thread, step by step.

All learners make step i, then step i + 1, and so on. An update reaches every
learner `delay_steps` steps after the offers that it merged, so that a result
can be computed by hand. With a folder, all of it can be saved and, as fresh
objects, goes on from there.
"""

import pathlib
import zlib

import jax
import ml_collections
import numpy as np

from diloco.checkpoint.learner_records import HeldState, LearnerRecords
from diloco.config import run_config
from diloco.data import pipeline
from diloco.learner import restore
from diloco.learner.local_delta import LocalDelta
from diloco.learner.programs import LearnerPrograms
from diloco.metrics.workdir import Workdir, learner_name
from diloco.models import api
from diloco.numerics import payload
from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.machine import Learner
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.machine import Syncer
from diloco.run.spec import make_run_spec
from diloco.syncer.outer_state import OuterState
from diloco.syncer.stats import RunStats
from diloco.syncer.storage import SyncerDisk
from experiments import common

L = 6  # Tokens of a sequence; w of the toy model is [L, L].
LAYERS = 3
SAVE_S = 60.0


def toy_model() -> api.Model:
  """y ≈ x·Σ_l (l+1)·w_l + b on bytes scaled to [0, 1]; not even Flax."""

  def init(key):
    w = 0.1 * jax.random.normal(key, (LAYERS, L, L))
    return {'b': jax.numpy.zeros(L), 'layers': {'w': w}}

  def loss(params, batch, key):
    x, y = batch['tokens'][:, :-1] / 256, batch['tokens'][:, 1:] / 256
    factors = jax.numpy.arange(1.0, LAYERS + 1)
    w = jax.numpy.tensordot(factors, params['layers']['w'], 1)
    error = x @ w + params['b'] - y
    return 0.5 * jax.numpy.mean(error**2), {}

  return api.Model(
    init,
    loss,
    axes={'b': (None,), 'layers/w': (None, None, None)},
    roles={'b': 'plain', 'layers/w': 'stacked'},
  )


def toy_gradient(params, tokens):
  """The gradient of `toy_model`'s loss, by hand, in numpy f64."""
  x, y = tokens[:, :-1] / 256, tokens[:, 1:] / 256
  factors = np.arange(1.0, LAYERS + 1)
  w = np.tensordot(factors, params['layers/w'], 1)
  error = (x @ w + params['b'] - y) / x.size
  return {'b': error.sum(0), 'layers/w': factors[:, None, None] * (x.T @ error)}


def toy_config(**protocol) -> ml_collections.ConfigDict:
  """Plain SGD, no codec, mean merge; the protocol as asked."""
  config = common.base()
  config.name = 'lockstep'
  config.data.update(
    source='grammar', seq_len=L, batch=4, shards=4, grammar_bytes=4096
  )
  config.inner.update(
    optimizer='sgd', lr=0.5, schedule='constant', warmup_steps=0
  )
  config.codec.update(up='f32', down='f32')
  config.merge.update(rule='mean')
  config.protocol.update(total_steps=10_000, **protocol)
  return config


class _LockstepLearner:
  """A learner of machine, parameters and host copy, without a thread."""

  def __init__(self, lockstep, learner: int):
    run_spec = lockstep.run_spec
    self.id = learner
    self._lockstep = lockstep
    self._programs = lockstep.programs
    self._records = lockstep.records(learner)
    restored = restore.restore(run_spec, lockstep.programs, self._records)
    self.host = restored.host
    self.machine = Learner(
      run_spec.config.protocol,
      run_spec.config.name,
      learner,
      run_spec.fingerprints,
      restored.start,
    )
    self.params, self.inner_state = restored.params, restored.inner_state
    self._size = run_spec.config.data.batch
    self._dataset = run_spec.dataset(learner)
    self._own = LocalDelta(
      lockstep.programs,
      run_spec.config.protocol.blend,
      {p: self.host.fragment(p)[1] for p in lockstep.fragments},
      self.params,
    )
    self.offers = {}
    self.steps = self.rows = 0
    self._loss = None

  def handle(self, event):
    for effect in self.machine.handle(event, self._lockstep.now):
      self._perform(effect)

  def step(self):
    batch = self._programs.put_batch(self.batch(self.steps))
    lr = self._lockstep.run_spec.config.inner.lr
    self.params, self.inner_state, metrics = self._programs.step(
      self.params, self.inner_state, batch, lr, (self.id, self.rows)
    )
    self.steps += 1
    self.rows += self._size
    tokens = self._programs.tokens_per_step
    self.handle(learner_events.Boundary(tokens))
    self._loss = float(metrics['loss'])
    self.handle(
      learner_events.Completed(tokens, self.rows, 1.0, 0.0, self._loss)
    )

  def batch(self, i: int):
    """The batch of its step i + 1."""
    return pipeline.batch_at(self._dataset, i * self._size, self._size)

  def save(self):
    """Saves as `learner/train_loop.py` does at this boundary."""
    progress = restore.progress_of(
      self.machine.snapshot(), self.rows, 1, self.host.crcs()
    )
    written = self._records.save_state(
      self.steps,
      HeldState(self.params, self.inner_state),
      lambda: self._own.bases,
      progress,
    )
    assert written
    self._records.close(SAVE_S)

  def _perform(self, effect):
    match effect:
      case learner_events.Send():
        self._lockstep.tell_syncer(self, effect.message)
      case learner_events.Draw():
        self._draw()
      case learner_events.Snapshot():
        self._offer(effect)
      case learner_events.FetchUpdates():
        for update in effect.updates:
          self._fetch(update)
      case learner_events.Apply():
        p = effect.fragment
        held, theta = self.host.fragment(p)
        assert held == effect.version, f'{held=} {effect=}'
        placed = self._programs.put_fragment(p, theta)
        self.params = self._own.take_in(
          p, self.params, theta, placed, effect, training=True
        )
      case learner_events.Forget():
        for handle in effect.handles:
          self.offers.pop(handle)
      case learner_events.Begin():
        self.rows = effect.rows
        self.steps = effect.rows // self._size
      case _:
        raise TypeError(f'not in a lockstep: {effect!r}')

  def _offer(self, effect: learner_events.Snapshot):
    lockstep = self._lockstep
    p = effect.fragment
    pieces = lockstep.run_spec.layout.fragments[p]
    handle = effect.handle
    theta = self._own.snapshot(p, self.params, handle, effect.keep)
    base = self._own.reference(p)
    delta = {k: np.asarray(base[k]) - np.asarray(theta[k]) for k in theta}
    data = payload.encode(delta, pieces, lockstep.run_spec.up)
    self.offers[handle] = data
    found = messages.Payload(
      handle, lockstep.run_spec.up.name, data.nbytes, zlib.crc32(data)
    )
    lockstep.tell_syncer(
      self,
      messages.Offer(
        effect.round,
        p,
        effect.base_version,
        effect.c_steps,
        effect.c_tokens,
        effect.step,
        found,
      ),
    )

  def _draw(self):
    run_spec, programs = self._lockstep.run_spec, self._programs
    self.params, self.inner_state = programs.draw()
    held = restore.initial_replicas(run_spec, programs, self.params)
    self.host.begin(held)
    self._own.bases.update((p, x.theta) for p, x in enumerate(held))
    self.handle(learner_events.Drawn(self.host.crcs()))

  def _fetch(self, update: messages.Update):
    p, version = update.fragment, update.version
    parts = (self._lockstep.sent[p, version],)
    self.host.update(p, version, parts, update.crc)
    self.handle(learner_events.Rebuilt(p, version, update.crc))


class Lockstep:
  """M learners and a syncer.

  Args:
    config: of `toy_config`, or any other that is small.
    learners: M.
    delay_steps: from the boundary of an offer to that of its update.
    model: in place of the config's.
    folder: to save to, and with what this begins.
    incarnation: of all learners.
  """

  def __init__(
    self,
    config,
    learners: int,
    delay_steps: int,
    model=None,
    folder: pathlib.Path | None = None,
    incarnation: int = 1,
  ):
    self.run_spec = make_run_spec(run_config.build(config), model)
    self.fragments = range(self.run_spec.config.protocol.fragments)
    self.now = 0.0
    self.programs = LearnerPrograms(self.run_spec)
    self.model = OuterState(self.run_spec)
    self.sent: dict[tuple[int, int], np.ndarray] = {}
    self.published: list[syncer_events.Publish] = []
    self._delay_steps = delay_steps
    self._due: list[tuple[int, messages.Update]] = []
    self._contributions = {}
    self._incarnation = incarnation
    self._workdir = Workdir(folder or pathlib.Path('nowhere'))
    stats = RunStats(self.run_spec.config)
    self._disk = SyncerDisk(self.run_spec, self._workdir, self.model, stats)
    self.syncer: Syncer = self._disk.begin()
    self.learners = [_LockstepLearner(self, m) for m in range(learners)]
    self._steps = 0
    for learner in self.learners:
      learner.handle(learner_events.Connected(incarnation, ('here',)))

  def run(self, steps: int):
    for _ in range(steps):
      self._steps += 1
      self.now += 1.0
      due = [u for at, u in self._due if at <= self._steps]
      self._due = [(at, u) for at, u in self._due if at > self._steps]
      for learner in self.learners:
        for update in due:
          learner.handle(learner_events.Heard(update))
        learner.step()
      assert not any(learner.machine.waiting for learner in self.learners)

  def records(self, learner: int) -> LearnerRecords:
    """The checkpoints of a learner."""
    return LearnerRecords(
      self._workdir.checkpoints(learner_name(learner)),
      learner,
      self.run_spec.fingerprints,
      keep_latest=1,
      say=print,
    )

  def save(self):
    """Saves all of it to its folder."""
    ledger = self.syncer.ledger()
    self._disk.commit(ledger, self.model.crcs())
    self._disk.save_last(ledger, self.model.crcs())
    self._disk.close()
    for learner in self.learners:
      learner.save()

  def tell_syncer(self, learner: _LockstepLearner, message):
    self._deliver(syncer_events.Heard(learner.id, self._incarnation, message))

  def _deliver(self, event):
    for effect in self.syncer.handle(event, self.now):
      self._perform(effect)

  def _perform(self, effect):
    match effect:
      case syncer_events.AdmitLearner():
        welcome = messages.Welcome(
          effect.step,
          effect.closed_round,
          effect.versions,
          self.model.crcs(),
          effect.rows,
          effect.live,
          effect.clean,
          ('here',),
        )
        self.learners[effect.learner].handle(learner_events.Heard(welcome))
      case syncer_events.Send():
        learner = self.learners[effect.learner]
        learner.handle(learner_events.Heard(effect.message))
      case syncer_events.Pull():
        learner = self.learners[effect.learner]
        pieces = self.run_spec.layout.fragments[effect.offer.fragment]
        data = learner.offers[effect.offer.payload.handle]
        v = payload.decode(data, pieces, self.run_spec.up)
        self._contributions[effect.round, effect.learner] = v
        norm = sum(float((x**2).sum()) for x in v.values()) ** 0.5
        handle = effect.offer.payload.handle
        session = effect.round, effect.learner, effect.incarnation, handle
        self._deliver(syncer_events.Pulled(*session, norm))
      case syncer_events.Merge():
        self._merge(effect)
      case syncer_events.Publish():
        self._publish(effect)
      case syncer_events.LogDecision() | syncer_events.Retire():
        pass
      case _:
        raise TypeError(f'not in a lockstep: {effect!r}')

  def _merge(self, effect: syncer_events.Merge):
    taken = {
      s.learner: self._contributions.pop((effect.round, s.learner))
      for s in effect.shares
    }
    weights = {s.learner: s.weight for s in effect.shares}
    outcome = self.model.outer_step(effect.fragment, taken, weights)
    self.model.install(effect.fragment, outcome)
    self._crc = outcome.crc
    self.sent[effect.fragment, effect.version] = outcome.data
    self._deliver(syncer_events.Merged(effect.round))

  def _publish(self, effect: syncer_events.Publish):
    self.published.append(effect)
    data = self.sent[effect.fragment, effect.version]
    offered = messages.Payload(
      effect.round, self.run_spec.down.name, data.nbytes, zlib.crc32(data)
    )
    update = effect.update(effect.recipients[0], offered, self._crc)
    if self._delay_steps:
      self._due.append((self._steps + self._delay_steps, update))
    else:
      for learner in self.learners:
        learner.handle(learner_events.Heard(update))
