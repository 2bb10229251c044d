# SPDX-License-Identifier: Apache-2.0
"""Completes Θ of a restarted syncer from what learners donate."""

from diloco.protocol import syncer_io
from diloco.protocol.syncer import Syncer
from diloco.runtime.results import ResultLost
from diloco.runtime.shard_roll import Roll
from diloco.runtime.shards import Shards
from diloco.runtime.syncer_disk import Found, SyncerDisk
from diloco.runtime.tape import Tape
from diloco.runtime.tape_lines import Started


class Regaining:
  """Moves donated fragments into Θ, the ledger and the tape.

  Args:
    shards: take in what is donated.
    roll: knows the run's versions.
    disk: saves Θ once it is complete.
    tape: records it then.
    found: what this process started from.
  """

  def __init__(
    self, shards: Shards, roll: Roll, disk: SyncerDisk, tape: Tape, found: Found
  ):
    self._shards = shards
    self._roll = roll
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

  def relabel(self, effect: syncer_io.Relabel, machine: Syncer):
    """Makes a donated fragment, or the one that is here, Θ_p.

    Raises:
      ResultLost: the run is over, and this is not its result.
    """
    ledger = machine.ledger()
    self._shards.relabel(effect)
    p, final = effect.fragment, self._disk.final_crcs
    if final is not None and self._roll.crcs()[p] != final[p]:
      raise ResultLost(f'fragment {p} of the final parameters: nobody has it')
    # The machine may know of two at once; here they follow in turn.
    if machine.whole and self._roll.versions() == ledger.versions:
      crcs = self._roll.crcs()
      self._disk.commit(ledger, crcs)
      self._disk.save(ledger, crcs)
      self.note(machine)

  def _say_standing(self, machine: Syncer):
    """Records on the tape what this process continues from."""
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
