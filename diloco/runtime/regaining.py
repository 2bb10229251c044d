# SPDX-License-Identifier: Apache-2.0
"""How a restarted syncer makes Θ whole again, from what learners give back."""

from diloco.protocol import syncer_io
from diloco.protocol.syncer import Syncer
from diloco.runtime.results import ResultLost
from diloco.runtime.shard_roll import Roll
from diloco.runtime.shards import Shards
from diloco.runtime.syncer_disk import Found, SyncerDisk
from diloco.runtime.tape import Tape
from diloco.runtime.tape_lines import Started


class Regaining:
  """Lost fragments, from what a learner gave to the ledger and the tape.

  Args:
    shards: take in what comes back.
    roll: what the run has.
    disk: learns of it once all is here.
    tape: likewise.
    found: what the process began with.
  """

  def __init__(
    self, shards: Shards, roll: Roll, disk: SyncerDisk, tape: Tape, found: Found
  ):
    self._shards = shards
    self._roll = roll
    self._disk = disk
    self._tape = tape
    self._found = found
    self._said = False  # What this process began with.
    if found.published:
      tape.complete(found.published)
    self.note(found.machine)

  def note(self, machine: Syncer):
    """Says on the tape what this process begins with, once all of it is here.

    To be called before anything is merged.
    """
    if not self._said and machine.whole and not machine.away:
      self._say_standing(machine)

  def relabel(self, effect: syncer_io.Relabel, machine: Syncer):
    """What a learner gave, or else what is here, is Θ_p.

    Raises:
      ResultLost: the run is over, and this is not what it came to.
    """
    ledger = machine.ledger()
    self._shards.relabel(effect)
    p, final = effect.fragment, self._disk.final_crcs
    if final is not None and self._roll.crcs()[p] != final[p]:
      raise ResultLost(f'fragment {p} of the final parameters: nobody has it')
    # The machine may know of two at once; here they become so in turn.
    if machine.whole and self._roll.versions() == ledger.versions:
      crcs = self._roll.crcs()
      self._disk.commit(ledger, crcs)
      self._disk.save(ledger, crcs)
      self.note(machine)

  def _say_standing(self, machine: Syncer):
    """On the tape: what this process goes on with, once Θ is whole."""
    ledger = machine.ledger()
    outer = [self._roll.outer(p) for p in range(len(ledger.versions))]
    self._said = True
    self._tape.start(
      Started(
        closed_round=ledger.closed_round,
        versions=ledger.versions,
        crcs=self._roll.crcs(),
        outer_versions=tuple(version for version, _ in outer),
        outer_crcs=tuple(crc for _, crc in outer),
      )
    )
