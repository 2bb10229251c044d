# SPDX-License-Identifier: Apache-2.0
"""Holds what the syncer keeps up to date against what it would rebuild.

The machine never looks at all learners for one event: indices of its members,
its ranking of clocks, and what open rounds know of each learner change with
what they are derived from. A change that goes past them is found here.
"""

from diloco.protocol.syncer import collecting, pulls
from diloco.protocol.syncer.collecting import Candidates
from diloco.protocol.syncer.machine import Syncer
from diloco.protocol.syncer.pulls import Waits
from diloco.protocol.syncer.state import Members, Round, Stage, SyncerState

INDICES = 'live', 'leaving', 'straggling', 'seeking', 'handed_in'


def check_derived(machine: Syncer):
  """Raises `AssertionError` if something differs from what is rebuilt."""
  state = machine._state
  members = Members(dict(sorted(state.members.items())), set())
  assert list(state.members) == list(members), 'not in ascending id'
  for name in INDICES:
    kept, rebuilt = getattr(state.members, name), getattr(members, name)
    assert kept == rebuilt, (name, kept, rebuilt)
  silent_at_s = min(
    (x.silent_at_s for x in state.members.values()), default=float('inf')
  )
  assert state.members.silent_at_s() == silent_at_s
  assert state.pace._ranked == sorted(state.pace.clocks.values())
  for round_ in state.rounds.values():
    assert list(round_.pulls) == sorted(round_.pulls), round_
    assert round_.pulled <= round_.pulls.keys(), round_
    _check_round(state, round_)


def _check_round(state: SyncerState, round_: Round):
  p, kept = round_.fragment, round_.candidates
  # Candidates of another version, or from before the finish, are not used.
  if kept is not None and (kept.version, kept.last) == (
    state.versions[p],
    state.finishing,
  ):
    candidates = Candidates(state, round_)
    for learner in state.members:
      candidates.look(state, round_, learner)
    assert collecting.candidates(state, round_) is kept
    assert vars(kept) == vars(candidates), (
      round_,
      vars(kept),
      vars(candidates),
    )
  if round_.stage is Stage.PULLING and round_.waits is not None:
    waits = Waits()
    for learner in round_.pulls:
      waits.put(learner, pulls._awaited_pull(state, round_, learner))
    assert pulls._waits(state, round_) is round_.waits
    assert vars(round_.waits) == vars(waits), (round_, vars(waits))
