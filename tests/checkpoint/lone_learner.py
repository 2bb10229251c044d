# SPDX-License-Identifier: Apache-2.0
"""A learner's train loop without a syncer, on the quadratic model."""

import itertools
import pathlib

import numpy as np

from diloco.bench.real_run import bowl, get_config
from diloco.checkpoint.learner_records import LearnerRecords
from diloco.config import run_config
from diloco.learner import restore
from diloco.learner.programs import LearnerPrograms
from diloco.learner.train_loop import TrainLoop
from diloco.protocol import host_messages
from diloco.protocol.learner import state as learner_state
from diloco.protocol.learner.machine import Learner
from diloco.run.spec import RunSpec, make_run_spec

FRAGMENTS = 10


class NoSyncer:
  """The exchange of a learner to which nothing ever happens."""

  global_step = incarnation = process = 1
  waiting = False

  def handle(self, event):
    pass

  def next_boundary(self, wait: bool):
    pass

  def machine_state(self) -> learner_state.LearnerState:
    return self.start.snapshot()


class Nowhere:
  """Metrics and event log that keep nothing."""

  def __getattr__(self, name):
    return lambda *_: None


def run_spec_of(millions: float) -> RunSpec:
  """Returns a run of one learner with about so many million parameters."""
  config = get_config()
  config.protocol.update(
    learners=1, quorum=1, fragments=FRAGMENTS, sync_every_steps=FRAGMENTS
  )
  config.run.log_every_steps = 1 << 30
  config.checkpoint.learner_every_steps = 1  # The test says when.
  with config.unlocked():
    config.update_from_flattened_dict(bowl(millions))
  return make_run_spec(run_config.build(config))


class LoneLearner:
  """A train loop with all that it saves to."""

  def __init__(self, run_spec: RunSpec, folder: pathlib.Path):
    self.said: list[str] = []
    self.records = LearnerRecords(
      folder, 0, run_spec.fingerprints, 2, self.said.append
    )
    self.programs = LearnerPrograms(run_spec)
    restored = restore.restore(run_spec, self.programs, self.records)
    exchange = NoSyncer()
    exchange.start = Learner(
      run_spec.config.protocol,
      run_spec.config.name,
      0,
      run_spec.fingerprints,
      restored.start,
    )
    self.loop = TrainLoop(
      run_spec,
      0,
      self.programs,
      restored,
      exchange,
      self.records,
      Nowhere(),
      Nowhere(),
      notice_s=1.0,
    )
    self.loop._state.perform(host_messages.DrawTheta())
    self.loop._state.holder.begin()
    self.loop._training = True
    rows = run_spec.config.data.batch, run_spec.config.data.seq_len + 1
    self.batch = {'tokens': np.zeros(rows, np.int32)}
    self.loop._state._batches = itertools.repeat(self.batch)

  def steps(self, count: int):
    """Makes steps, and saves at none of them."""
    save = self.loop._save_if_due
    self.loop._save_if_due = lambda: 0.0
    for _ in range(count):
      self.loop._inner_step()
    self.loop._save_if_due = save
