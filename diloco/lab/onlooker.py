# SPDX-License-Identifier: Apache-2.0
"""Observes the lab's cluster: counts, and forwards events to a journal."""

import dataclasses

from diloco.lab.journal import Journal
from diloco.metrics import names
from diloco.protocol import learner_io, syncer_io
from diloco.runtime.blueprint import Blueprint
from diloco.sim.tally import Tally
from diloco.sim.token_watch import TokenWatch


class Onlooker(Tally):
  """A tally that also forwards to a journal.

  Attributes:
    merged_tokens: tokens of merged contributions, mean over the fragments.
    ledger: where each learner's tokens went.

  Args:
    timeline_s: see `Tally`.
    fragments: P.
    journal: receives events.
    blueprint: gives the learning rate.
  """

  def __init__(
    self,
    timeline_s: float,
    fragments: int,
    journal: Journal,
    blueprint: Blueprint,
  ):
    super().__init__(timeline_s)
    self.merged_tokens = 0.0
    self.ledger = TokenWatch(fragments)
    self._fragments = fragments
    self._journal = journal
    self._blueprint = blueprint
    self._schedule = blueprint.schedule()
    self._publishing: syncer_io.Publish | None = None

  def at_syncer(self, syncer, event, effects):
    super().at_syncer(syncer, event, effects)
    self.ledger.at_syncer(syncer, event, effects)
    for effect in effects:
      match effect:
        case syncer_io.Merge():
          tokens = sum(share.c_tokens for share in effect.shares)
          self.merged_tokens += tokens / self._fragments
          self._decided(syncer.now, effect)
        case syncer_io.Publish():
          self._publishing = effect  # Its line has the resulting CRC.
        case syncer_io.Record() | syncer_io.End() | syncer_io.Greet():
          self._decided(syncer.now, effect)
    self._now_s = syncer.now

  def theta(self, fragment: int, version: int, crc: int):
    published, self._publishing = self._publishing, None
    if published is not None:
      self._decided(self._now_s, published, crc=crc)

  def at_learner(self, process, event, effects):
    super().at_learner(process, event, effects)
    self.ledger.at_learner(process, event, effects)
    if isinstance(event, learner_io.Completed):
      progress = self._blueprint.progress(
        process.stepped_at, process.position - 1
      )
      scalars = {
        names.TIME: process.now,
        names.INCARNATION: process.incarnation,
        names.GLOBAL_STEP: process.machine.global_step,
        names.TRAIN_LOSS: event.loss,
        names.LEARNING_RATE: self._schedule(progress),
        names.STEP_TIME: event.step_s,
        names.STALL_TIME: 0.0,
        names.TOKENS_PER_S: event.tokens / event.step_s,
      }
      self._journal.stepped(process.id, process.steps, scalars)

  def _decided(self, at_s: float, effect: syncer_io.Effect, **more):
    fields = dataclasses.asdict(effect) | more
    self._journal.decided(at_s, type(effect).__name__, fields)
