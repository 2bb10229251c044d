# SPDX-License-Identifier: Apache-2.0
"""The syncer's ledger, and checkpoints of its state.

The ledger is small and written at each close, before the update is sent
(persist, then send), so that no learner ever knows of a version that a
restarted syncer does not. The arrays of all fragments are saved concurrently
with the rounds, every few of them. So the fragments of a checkpoint may be
older than the ledger says; learners hold the newer ones, and the ledger holds
their CRCs.

The ledger carries a checksum; the previous one is kept, and each checkpoint
contains the ledger of its round. A process resumes from the newest of them that
is intact.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import jax

from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.folders import BROKEN
from diloco.checkpoint.store import Checkpoints, newest_after
from diloco.metrics import files
from diloco.protocol.syncer.state import LearnerAccount, Ledger
from diloco.protocol.values import Ema

FIELDS = ('theta', 'residual', 'optimizer_state')  # Of `outer.FragmentState`.
LOCK = 'lock'
LOCK_S = 10.0  # Time for an earlier process to end.
LOCK_AGAIN_S = 0.1


def newest_theta_after(
  places: Sequence[pathlib.Path], closed_round: int
) -> tuple[int, list[dict[str, Any]]] | None:
  """Returns Θ as a syncer saved it after a later round, for readers.

  Args:
    places: folders of the checkpoints of all shards, the leader's first.
    closed_round: the last round that was read.

  Returns:
    The last round that is included, and piece name -> f32 array by fragment;
    None if there is nothing newer.
  """
  newest = newest_after(places[0], closed_round)
  if newest is None:
    return None
  thetas: dict[int, dict[str, Any]] = {}
  for place in places:
    # All shards save after the same rounds, but not at the same time.
    part = newest_after(place, newest.step - 1)
    if part is None or part.step != newest.step:
      return None
    for p in part.meta['fragments']:
      theta = _under(f'theta/{p}/', part.arrays)
      thetas[p] = thetas.get(p, {}) | theta
  return newest.step, [thetas[p] for p in sorted(thetas)]


def _under(place: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the arrays below a place of the saved tree, by their path there."""
  return {
    name.removeprefix(place): array
    for name, array in arrays.items()
    if name.startswith(place)
  }


class SyncerRecords:
  """Reads and writes one folder, and that of its checkpoints.

  `write_ledger` is for one thread; `save`, `restore` and `close` are for one,
  possibly another.

  Args:
    folder: on a disk; no other process writes to it, see `occupy`.
    states: of the checkpoints; see `Checkpoints`.
    every_rounds: the interval of `due`.
    batch: rows of a learner's batch, in which ledgers once counted.
    sync: True if a written ledger has to survive a loss of power, see
      `files.replace`.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    states: pathlib.Path,
    keep_latest: int,
    every_rounds: int,
    say: Callable[[str], None],
    batch: int,
    sync: bool = False,
  ):
    self._folder = folder
    self._ledger = folder / 'ledger.json'
    self._previous = folder / 'ledger.previous.json'
    self._every_rounds = every_rounds
    self._say = say
    self._batch = batch
    self._sync = sync
    # Messages about the ledger, which is read twice.
    self._logged: set[str] = set()
    self._lock: BinaryIO | None = None
    self._states = Checkpoints(states, keep_latest, say)

  def occupy(self) -> None:
    """Keeps other processes out of the folder until `close`.

    The kernel releases the lock when this process dies, in whatever way.

    Raises:
      BrokenRecord: another process has it, and keeps it for `LOCK_S`.
    """
    self._folder.mkdir(parents=True, exist_ok=True)
    lock = (self._folder / LOCK).open('a+b')
    give_up_s = time.monotonic() + LOCK_S
    while True:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        lock.seek(0)
        holder = lock.read().decode(errors='replace').strip()
        if time.monotonic() >= give_up_s:
          lock.close()
          raise BrokenRecord(
            f'{self._folder} is in use by {holder or "another process"}'
          ) from None
        time.sleep(LOCK_AGAIN_S)
      except OSError as error:
        self._say(f'{self._folder} is not locked: {error}')
        break
    self._lock = lock
    with contextlib.suppress(OSError):  # The lock is held all the same.
      lock.truncate(0)
      lock.write(f'process {os.getpid()} of {socket.gethostname()}'.encode())
      lock.flush()

  # The ledger ---------------------------------------------------------------

  def write_ledger(
    self, ledger: Ledger, counts: Mapping, crcs: Sequence[int | None]
  ) -> None:
    """Commits a close: what it names survives any process's death.

    Args:
      counts: any JSON; it is returned unchanged by `read_ledger`.
      crcs: CRC of each Θ_p at `ledger.versions`.

    Raises:
      OSError: it could not be written; the round has not closed.
    """
    self._folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_record(ledger, counts, crcs)).encode()
    files.replace(self._ledger, files.seal(text), self._sync, self._previous)

  def read_ledger(self) -> tuple[Ledger, dict, tuple[int | None, ...]] | None:
    """Returns the newest ledger, counts and CRCs; None if no round has closed.

    It reads the file, the one before it, and the one in the newest checkpoint.
    A broken file is renamed, and logged.

    Raises:
      BrokenRecord: there is no ledger, but a checkpoint that does not contain
        one; or the file belongs to another version of this program.
    """
    records, unsealed = [], []
    for path in (self._ledger, self._previous):
      try:
        record = self._read_file(path)
      except BrokenRecord as error:
        self._say_once(f'{error}: it is passed over')
        unsealed.append(error)
      else:
        records += [(path, record)] if record is not None else []
    meta = self._states.newest_meta() or {}
    if 'record' in meta:
      name = f'the checkpoint of round {self._states.newest_step}'
      records.append((name, meta['record']))
    if not records and unsealed:
      raise unsealed[0]
    if not records:
      if not meta:
        return None
      raise BrokenRecord(
        f'{self._ledger} is missing, though {self._folder} holds a checkpoint '
        f'of round {self._states.newest_step}: bring it back, or remove the '
        f'folder to begin anew'
      )
    source, record = max(records, key=lambda pair: _closed_round(pair[1]))
    if source != self._ledger:
      self._say_once(
        f'goes on from {source}, round {_closed_round(record)}: '
        f'{self._ledger} is older, or can not be read'
      )
    try:
      return _from_record(record, self._batch)
    except (ValueError, KeyError, TypeError) as error:
      raise BrokenRecord(f'{source}: {error!r}') from error

  def _read_file(self, path: pathlib.Path) -> dict | None:
    try:
      data = path.read_bytes()
    except FileNotFoundError:
      return None
    try:
      text = files.unseal(data)
    except ValueError as error:
      aside = path.with_name(path.name + BROKEN)
      self._say(f'{path} is passed over, as {aside.name}: it {error}')
      os.replace(path, aside)
      return None
    if text is None:  # It may be undamaged, but of an older program.
      raise BrokenRecord(f'{path} has no checksum')
    return json.loads(text)

  def _say_once(self, line: str):
    if line not in self._logged:
      self._logged.add(line)
      self._say(line)

  # The states ---------------------------------------------------------------

  @property
  def failed(self) -> int:
    """Number of saves that were begun and failed."""
    return self._states.failed

  def due(self, closed_round: int) -> bool:
    """Returns True if a save is due."""
    return closed_round % self._every_rounds == 0

  def save(
    self,
    closed_round: int,
    states: Sequence,
    fragments: Sequence[int] | None = None,
    ledger: tuple[Ledger, Mapping, Sequence[int]] | None = None,
  ) -> bool:
    """Starts to save all fragments; see `Checkpoints.save`.

    Args:
      closed_round: the last round that is in `states`.
      states: a `numerics.outer.FragmentState` per fragment. Their arrays are
        replaced as a whole and never written to.
      fragments: indices of these states' fragments; None: all, in order.
      ledger: current arguments of `write_ledger`; None: kept elsewhere.
    """
    fragments = range(len(states)) if fragments is None else fragments
    meta: dict[str, Any] = {
      'versions': [state.version for state in states],
      'fragments': list(fragments),
    }
    if ledger is not None:
      meta['record'] = _record(*ledger)
    return self._states.save(closed_round, _tree(states, fragments), meta)

  def restore(
    self, like: Sequence, fragments: Sequence[int] | None = None
  ) -> tuple[tuple[int, ...], list] | None:
    """Restores versions and states of the newest intact checkpoint.

    Args:
      like: a state per fragment, whose arrays have the right shapes.
      fragments: as for `save`.

    Returns:
      None if there is none. A version may be older than the ledger's.
    """
    fragments = range(len(like)) if fragments is None else fragments
    likes = jax.tree.map(_on_host, _tree(like, fragments))
    saved = self._states.restore(likes)
    if saved is None:
      return None
    versions = tuple(saved.meta['versions'])
    states = [
      dataclasses.replace(
        like_state, version=version, **{x: saved.arrays[x][p] for x in FIELDS}
      )
      for like_state, version, p in zip(like, versions, fragments)
    ]
    self._say(f'fragments of versions {versions} from {saved.path}')
    return versions, states

  def wait(self, timeout_s: float) -> bool:
    """Waits for the save in progress; returns True if it is over."""
    return self._states.wait(timeout_s)

  def close(self, timeout_s: float) -> None:
    """Waits for the save in progress, and unlocks the folder."""
    self._states.close(timeout_s)
    if self._lock is not None:
      with contextlib.suppress(OSError):
        self._lock.close()
      self._lock = None


def _tree(states: Sequence, fragments: Sequence[int]) -> dict[str, Any]:
  """Returns the arrays by field, fragment and name."""
  return {
    field: {p: getattr(x, field) for p, x in zip(fragments, states)}
    for field in FIELDS
  }


def _on_host(leaf) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _record(
  ledger: Ledger, counts: Mapping, crcs: Sequence[int | None]
) -> dict:
  """Returns the ledger file's contents as JSON."""
  assert len(crcs) == len(ledger.versions), f'{crcs=} {ledger.versions=}'
  return {**dataclasses.asdict(ledger), 'counts': counts, 'crcs': list(crcs)}


def _closed_round(record: Mapping) -> int:
  found = record.get('closed_round')
  return found if type(found) is int else -1


def _from_record(
  fields: Mapping, batch: int
) -> tuple[Ledger, dict, tuple[int | None, ...]]:
  """Converts JSON to a ledger; the inverse of `_record`."""
  ledger = Ledger(
    step=fields['step'],
    clocks=tuple((m, clock) for m, clock in fields['clocks']),
    closed_round=fields['closed_round'],
    versions=tuple(fields['versions']),
    accounts=tuple((m, _account(a, batch)) for m, a in fields['accounts']),
    quorum_s=Ema(**fields['quorum_s']),
    sync_s=Ema(**fields['sync_s']),
    usual_norms=tuple(fields['usual_norms']),
    last_round=fields['last_round'],
    ended=fields['ended'],
  )
  return ledger, fields['counts'], tuple(fields['crcs'])


def _account(fields: dict, batch: int) -> LearnerAccount:
  if 'position' in fields:  # Until 0.1.0.
    rows = fields['position'] * batch
    fields = {k: v for k, v in fields.items() if k != 'position'}
    fields['rows'] = rows
  bases = {int(p): v for p, v in fields['merged_bases'].items()}
  offers = {int(p): tuple(x) for p, x in fields['merged_offers'].items()}
  known = {'merged_bases': bases, 'merged_offers': offers}
  return LearnerAccount(**{**fields, **known})
