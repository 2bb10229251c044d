# SPDX-License-Identifier: Apache-2.0
"""How a restarted syncer makes Θ whole again, from what learners give back."""

from collections.abc import Callable

import numpy as np

from diloco.protocol import syncer_io
from diloco.protocol.syncer import Syncer
from diloco.runtime import contributions
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.global_model import GlobalModel
from diloco.runtime.syncer_disk import Found, SyncerDisk
from diloco.runtime.tape import Tape
from diloco.runtime.tape_lines import Started
from diloco.runtime.transfer_pace import TransferPace
from diloco.transport.interface import Inlet, TransferFailed

Session = tuple[int, int]  # (learner, incarnation)


class Regaining:
  """Lost fragments, from a learner's offer to the ledger and the tape.

  Args:
    blueprint: of the run.
    model: takes what comes back.
    disk: learns of it once all is here.
    tape: likewise.
    found: what the process began with.
    pace: knows how long a pull may take.
    tell: hands an event to the machine, from any thread.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    model: GlobalModel,
    disk: SyncerDisk,
    tape: Tape,
    found: Found,
    pace: TransferPace,
    tell: Callable[[syncer_io.Event], None],
  ):
    self._blueprint = blueprint
    self._model = model
    self._disk = disk
    self._tape = tape
    self._found = found
    self._pace = pace
    self._tell = tell
    self._taken: dict[tuple[int, Session], dict[str, np.ndarray]] = {}
    if found.published:
      tape.complete(found.published)
    if found.machine.whole:
      self._say_standing(found.machine)

  def take(self, effect: syncer_io.TakeFragment, inlet: Inlet):
    """On a pool: pulls a learner's copy of a fragment; always answers."""
    p, session = effect.offered.fragment, (effect.learner, effect.incarnation)
    try:
      theta = contributions.pull_fragment(
        effect.offered, effect.crc, inlet, self._blueprint, self._pace
      )
    except (TransferFailed, contributions.Unusable) as error:
      reason = f'{type(error).__name__}: {error}'
      self._tell(syncer_io.FragmentFailed(p, *session, reason))
      return
    self._taken[p, session] = theta
    self._tell(syncer_io.FragmentTaken(p, *session))

  def relabel(self, effect: syncer_io.Relabel, machine: Syncer):
    """What a learner gave, or else what is here, is Θ_p."""
    p = effect.fragment
    theta = effect.taken_of and self._taken[p, effect.taken_of]
    self._model.go_on(p, effect.version, theta)
    ledger = machine.ledger()
    # The machine may know of two at once; here they become so in turn.
    if machine.whole and self._model.versions() == ledger.versions:
      self._taken.clear()
      self._disk.commit(ledger, self._model.crcs())
      self._disk.save(ledger)
      self._say_standing(machine)

  def _say_standing(self, machine: Syncer):
    """On the tape: what this process goes on with, once Θ is whole."""
    ledger = machine.ledger()
    self._tape.start(
      Started(
        closed_round=ledger.closed_round,
        versions=ledger.versions,
        crcs=self._model.crcs(),
        outer_versions=self._found.versions,
        outer_crcs=self._found.crcs,
      )
    )
