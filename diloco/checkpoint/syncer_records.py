# SPDX-License-Identifier: Apache-2.0
"""What a restarted syncer goes on from: a ledger and checkpoints of its state.

The ledger is small and written at each close, before the update leaves
(persist, then send), so that no learner ever knows of a version that a
restarted syncer has not heard of. The arrays of all fragments are saved beside
the rounds, every so many. So the fragments of a checkpoint may be older than
the ledger says; learners hold the newer ones, and the ledger holds their CRCs.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from diloco.checkpoint.checkpoints import Checkpoints, newest_after
from diloco.checkpoint.volumes import BrokenRecord
from diloco.protocol.grace import Ema
from diloco.protocol.members import Account
from diloco.protocol.state import Ledger

STATES = 'states'  # Folder of the checkpoints, in the syncer's.


def newest_theta_after(
  folder: pathlib.Path, closed_round: int
) -> tuple[int, list[dict[str, Any]]] | None:
  """Θ as a syncer saved it after a later round, for who only reads.

  Args:
    folder: of the syncer.
    closed_round: of the last that was read.

  Returns:
    The last round that is in it, and piece name -> f32 array by fragment; None
    where there is nothing newer.
  """
  others = sorted(folder.glob('shard-*'))
  found = newest_after(folder / STATES, closed_round)
  if found is None:
    return None
  thetas: dict[int, dict[str, Any]] = {}
  for each in [folder, *others]:
    # All shards save after the same rounds, but not at the same time.
    part = newest_after(each / STATES, found.step - 1)
    if part is None or part.step != found.step:
      return None
    for i, p in enumerate(part.meta['fragments']):
      theta = _under(f'{i}/theta/', part.arrays)
      thetas[p] = thetas.get(p, {}) | theta
  return found.step, [thetas[p] for p in sorted(thetas)]


def _under(place: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
  """The arrays at a place of the tree that was saved, by what is left."""
  return {
    name.removeprefix(place): array
    for name, array in arrays.items()
    if name.startswith(place)
  }


class SyncerRecords:
  """Reads and writes one folder.

  `write_ledger` is for one thread; `save`, `restore` and `close` are for one,
  perhaps another.

  Args:
    folder: of the syncer.
    keep_latest: see `Checkpoints`.
    keep_best: see `Checkpoints`.
    every_rounds: the cadence of `due`.
    say: see `Checkpoints`.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    keep_latest: int,
    keep_best: int,
    every_rounds: int,
    say: Callable[[str], None],
  ):
    self._folder = folder
    self._every_rounds = every_rounds
    self._say = say
    self._states = Checkpoints(folder / STATES, keep_latest, keep_best, say)

  # The ledger ---------------------------------------------------------------

  def write_ledger(
    self, ledger: Ledger, counts: Mapping, crcs: Sequence[int]
  ) -> None:
    """Commits: what it names has closed, whoever dies now.

    Args:
      ledger: of the machine.
      counts: any JSON; it is handed back as it is.
      crcs: of each Θ_p at `ledger.versions`.

    Raises:
      OSError: it could not be written; the round has not closed.
    """
    assert len(crcs) == len(ledger.versions), f'{crcs=} {ledger.versions=}'
    fields = {
      **dataclasses.asdict(ledger),
      'counts': counts,
      'crcs': list(crcs),
    }
    self._folder.mkdir(parents=True, exist_ok=True)
    unfinished = self._ledger.with_suffix('.tmp')
    unfinished.write_text(json.dumps(fields))
    os.replace(unfinished, self._ledger)

  def read_ledger(self) -> tuple[Ledger, dict, tuple[int, ...]] | None:
    """Ledger, counts and CRCs; None where no round has closed here.

    Raises:
      BrokenRecord: the file can't be read, or is gone from beside checkpoints.
    """
    try:
      fields = json.loads(self._ledger.read_text())
      ledger = Ledger(
        step=fields['step'],
        clocks=tuple((m, clock) for m, clock in fields['clocks']),
        closed_round=fields['closed_round'],
        versions=tuple(fields['versions']),
        accounts=tuple((m, _account(a)) for m, a in fields['accounts']),
        quorum_s=Ema(**fields['quorum_s']),
        sync_s=Ema(**fields['sync_s']),
        usual_norms=tuple(fields['usual_norms']),
        last_round=fields['last_round'],
        ended=fields['ended'],
      )
      return ledger, fields['counts'], tuple(fields['crcs'])
    except FileNotFoundError:
      if self._states.newest_step is None:
        return None
      raise BrokenRecord(
        f'{self._ledger} is missing, though {self._folder} holds a checkpoint '
        f'of round {self._states.newest_step}: bring it back, or remove the '
        f'folder to begin anew'
      ) from None
    except (ValueError, KeyError, TypeError) as error:
      raise BrokenRecord(f'{self._ledger}: {error!r}') from error

  @property
  def _ledger(self) -> pathlib.Path:
    return self._folder / 'ledger.json'

  # The states ---------------------------------------------------------------

  @property
  def failed(self) -> int:
    """Saves that were begun and came to nothing."""
    return self._states.failed

  def due(self, closed_round: int) -> bool:
    """Whether it is the turn of a save."""
    return closed_round % self._every_rounds == 0

  def save(
    self,
    closed_round: int,
    states: Sequence,
    loss: float | None,
    fragments: Sequence[int] | None = None,
  ) -> bool:
    """Begins to save all fragments; see `Checkpoints.save`.

    Args:
      closed_round: the last round that is in `states`, in the ledger already.
      states: a `numerics.outer.FragmentState` per fragment. Their arrays are
        replaced as a whole and never written to.
      loss: of Θ, for `keep_best`.
      fragments: whose states these are; None: all, in order.
    """
    meta = {
      'versions': [state.version for state in states],
      'fragments': list(range(len(states)) if fragments is None else fragments),
    }
    return self._states.save(closed_round, _tree(states), meta, loss)

  def restore(self, like: Sequence) -> tuple[tuple[int, ...], list] | None:
    """Versions and states of the newest checkpoint that is whole.

    Args:
      like: a state per fragment, whose arrays have the right shapes.

    Returns:
      None where there is none. A version may be older than the ledger's.
    """
    likes = jax.tree.map(_on_host, _tree(like))
    found = self._states.restore(likes)
    if found is None:
      return None
    versions = tuple(found.meta['versions'])
    states = [
      dataclasses.replace(like_state, version=version, **arrays)
      for like_state, version, arrays in zip(like, versions, found.arrays)
    ]
    self._say(f'fragments of versions {versions} from {found.path}')
    return versions, states

  def wait(self, timeout_s: float) -> bool:
    """Waits for the save under way; whether it is over."""
    return self._states.wait(timeout_s)

  def close(self, timeout_s: float) -> None:
    """Waits for the save under way."""
    self._states.close(timeout_s)


def _tree(states: Sequence) -> list[dict[str, Any]]:
  return [
    {
      'theta': dict(state.theta),
      'residual': dict(state.residual),
      'optimizer_state': state.optimizer_state,
    }
    for state in states
  ]


def _on_host(leaf) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _account(fields: dict) -> Account:
  bases = {int(p): v for p, v in fields['merged_bases'].items()}
  return Account(**{**fields, 'merged_bases': bases})
