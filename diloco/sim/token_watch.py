# SPDX-License-Identifier: Apache-2.0
"""Keeps the token ledger of a simulated cluster, to the token."""

from diloco.metrics import token_ledger
from diloco.protocol import learner_io, syncer_io
from diloco.sim.watch import Watch


class TokenWatch(Watch):
  """An observer of both sides; simulated learners know their tokens exactly.

  Args:
    fragments: P.

  Attributes:
    accounts: by learner id.
  """

  def __init__(self, fragments: int):
    self.accounts: dict[int, token_ledger.Account] = {}
    self._fragments = fragments
    self._numbers: dict[object, int] = {}  # Of processes.
    self._sessions: dict[tuple[int, int], int] = {}  # Number, by incarnation.
    self._last: dict[int, object] = {}  # Processes, by number.

  def at_learner(self, process, event, effects):
    if process not in self._numbers:
      self._begin(process)
    number = self._numbers[process]
    account = self.accounts[process.id]
    match event:
      case learner_io.Connected(incarnation=incarnation):
        self._sessions[process.id, incarnation] = number
      case learner_io.Boundary(tokens=tokens):
        account.processes[number].last += tokens
    for effect in effects:
      match effect:
        case learner_io.Apply(fragment=p):
          account.apply(
            number,
            p,
            carry=effect.carry,
            handle=effect.handle,
            overwritten_tokens=effect.overwritten_tokens,
            training=process.training,
          )
        case learner_io.Snapshot(fragment=p, handle=handle):
          ours = account.processes[number]
          ours.offers[p, handle] = ours.last

  def at_syncer(self, syncer, event, effects):
    for effect in effects:
      if isinstance(effect, syncer_io.Publish):
        self._close(effect)

  def counts_from(self, process, fragment: int) -> int:
    """Returns the token count from which progress on θ_p is unsettled."""
    account = self.accounts[process.id]
    return account.processes[self._numbers[process]].counts[fragment]

  def rows(self) -> dict[tuple[int, int], token_ledger.Row]:
    """Returns the current balance, by learner and fragment."""
    for number, process in self._last.items():
      self.accounts[process.id].processes[number].end = _end_of(process)
    return {
      (m, p): account.row(p)
      for m, account in sorted(self.accounts.items())
      for p in range(self._fragments)
    }

  def _begin(self, process):
    number = self._numbers[process] = len(self._numbers)
    self._last[number] = process
    account = self.accounts.setdefault(
      process.id, token_ledger.Account(self._fragments)
    )
    state = process.machine.snapshot()
    counts = [fragment.from_tokens for fragment in state.fragments]
    account.begin(number, state.tokens, counts)

  def _close(self, publish: syncer_io.Publish):
    p, version = publish.fragment, publish.version
    for account in self.accounts.values():
      account.void(p, version)  # A ledger may have been lost.
    for share in publish.shares:
      number = self._sessions[share.learner, share.incarnation]
      name = number, share.handle
      merged = token_ledger.Merged(p, version, name, share.c_tokens)
      self.accounts[share.learner].merge(merged)


def _end_of(process) -> str | None:
  """Returns why a process ended; None while it runs."""
  if not process.alive:
    return token_ledger.DIED
  if process.left is None or process.left.done:
    return None
  if process.left.reason.startswith('quarantined'):
    return token_ledger.QUARANTINED
  return token_ledger.LEFT
