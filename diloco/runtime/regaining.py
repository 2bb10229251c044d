# SPDX-License-Identifier: Apache-2.0
"""How a restarted syncer makes Θ whole again, from what learners give back."""

from diloco.protocol import syncer_io
from diloco.protocol.syncer import Syncer
from diloco.runtime.shards import Shards
from diloco.runtime.syncer_disk import Found, SyncerDisk
from diloco.runtime.tape import Tape
from diloco.runtime.tape_lines import Started


class Regaining:
  """Lost fragments, from what a learner gave to the ledger and the tape.

  Args:
    shards: take in what comes back.
    disk: learns of it once all is here.
    tape: likewise.
    found: what the process began with.
  """

  def __init__(
    self, shards: Shards, disk: SyncerDisk, tape: Tape, found: Found
  ):
    self._shards = shards
    self._disk = disk
    self._tape = tape
    self._found = found
    if found.published:
      tape.complete(found.published)
    if found.machine.whole:
      self._say_standing(found.machine)

  def relabel(self, effect: syncer_io.Relabel, machine: Syncer):
    """What a learner gave, or else what is here, is Θ_p."""
    self._shards.relabel(effect)
    ledger = machine.ledger()
    # The machine may know of two at once; here they become so in turn.
    if machine.whole and self._shards.versions() == ledger.versions:
      self._disk.commit(ledger, self._shards.crcs())
      self._disk.save(ledger)
      self._say_standing(machine)

  def _say_standing(self, machine: Syncer):
    """On the tape: what this process goes on with, once Θ is whole."""
    ledger = machine.ledger()
    self._tape.start(
      Started(
        closed_round=ledger.closed_round,
        versions=ledger.versions,
        crcs=self._shards.crcs(),
        outer_versions=self._found.versions,
        outer_crcs=self._found.crcs,
      )
    )
