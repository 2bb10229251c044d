# SPDX-License-Identifier: Apache-2.0
"""Completes Θ of a restarted syncer from what learners donate."""

from absl import logging

from diloco.protocol import messages
from diloco.protocol import shard_messages as orders
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.machine import Syncer
from diloco.run.event_log import SyncerEventLog
from diloco.run.tape_events import Started
from diloco.syncer.results import ResultLost
from diloco.syncer.shard_coordinator import ShardCoordinator
from diloco.syncer.shard_registry import ShardAnswer, ShardLost, ShardRegistry
from diloco.syncer.storage import Found, SyncerDisk
from diloco.transport.control_server import ControlSession


class ShardRecovery:
  """Moves donated fragments into Θ, the ledger and the tape."""

  def __init__(
    self,
    shards: ShardCoordinator,
    registry: ShardRegistry,
    disk: SyncerDisk,
    tape: SyncerEventLog,
    found: Found,
  ):
    self._shards = shards
    self._registry = registry
    self._disk = disk
    self._tape = tape
    self._found = found
    self._said = False  # Whether the state of this process is on the tape.
    if found.published:
      tape.complete(found.published)
    self.note(found.machine)

  def note(self, machine: Syncer):
    """Records on the tape what this process continues from, once Θ is complete.

    Call it before anything is merged.
    """
    if not self._said and machine.whole and not machine.away:
      self._say_standing(machine)

  def relabel(self, effect: syncer_events.AdoptVersion, machine: Syncer):
    """Makes a donated fragment, or the one that is here, Θ_p.

    Raises:
      ResultLost: the run is over, and this is not its result.
    """
    ledger = machine.ledger()
    self._shards.relabel(effect)
    p, final = effect.fragment, self._disk.final_crcs
    if final is not None and self._registry.crcs()[p] != final[p]:
      raise ResultLost(
        f'fragment {p} of the final parameters: no process has it'
      )
    # The machine may know of two at once; here they follow in turn.
    if machine.whole and self._registry.versions() == ledger.versions:
      crcs = self._registry.crcs()
      self._disk.commit(ledger, crcs)
      self._disk.save(ledger, crcs)
      self.note(machine)

  def _say_standing(self, machine: Syncer):
    """Records on the tape what this process continues from."""
    ledger = machine.ledger()
    outer = [self._registry.outer(p) for p in range(len(ledger.versions))]
    self._said = True
    self._tape.start(
      Started(
        closed_round=ledger.closed_round,
        versions=ledger.versions,
        crcs=self._registry.crcs(),
        outer_versions=tuple(version for version, _ in outer),
        outer_crcs=tuple(crc for _, crc in outer),
        total_steps=self._disk.total_steps,
      )
    )


def of_shard(
  shards: ShardCoordinator,
  registry: ShardRegistry,
  machine: Syncer,
  session: ControlSession | None,
  said: ShardAnswer | ShardLost,
):
  """Yields the machine's events for a shard's message.

  A session of None is the lead's.
  """
  shard = said.shard
  if session is None:
    event = shards.heard(said)
  elif isinstance(said, ShardLost):
    if registry.session_of(shard) is not session:
      return
    event = shards.lose(shard, said.reason)
  elif isinstance(said.answer, orders.ShardHello):
    yield from _welcome_shard(shards, registry, machine, session, said.answer)
    return
  elif registry.session_of(shard) is session:
    event = shards.heard(said)
  else:
    return  # From a session that was replaced.
  if event is not None:
    yield event


def _welcome_shard(
  shards: ShardCoordinator,
  registry: ShardRegistry,
  machine: Syncer,
  session: ControlSession,
  hello: orders.ShardHello,
):
  reason = registry.why_refused(hello)
  if reason is not None:
    logging.warning('shard %d refused: %s', hello.shard, reason)
    session.send(messages.Refusal(reason, final=True))
    session.close(reason)
    return
  older = registry.session_of(hello.shard)
  if older is not None:
    yield shards.lose(hello.shard, 'a newer process took its place')
    older.close('a newer process took its place')
  logging.info('shard %d is here', hello.shard)
  believed = machine.knows_less
  back = shards.join(session, hello, believed)
  if back is not None:
    yield back
