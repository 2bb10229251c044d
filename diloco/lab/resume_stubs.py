# SPDX-License-Identifier: Apache-2.0
"""Contents whose arrays can be away while a run is replayed.

Everything that holds arrays has a number, the same in every process of the run.
What is still needed at a checkpoint is saved by number. The next process
replays what happened, which makes the same stubs with the same numbers, gives
them their arrays, and goes on.
"""

import gc
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from diloco.lab.packing import Likes
from diloco.lab.process_arrays import ArrayBackend
from diloco.lab.resume_log import Answers, Diverged
from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.contents import RefusedContribution


class Stub:
  """One array-valued object that is passed around, or waits.

  Attributes:
    value: the object; None while its arrays are away.
  """

  def __init__(self, value: Any):
    self.value = value

  def state(self) -> Any:
    return self.value

  def go_on(self, value: Any):
    self.value = value


class StubBackend:
  """An implementation of `diloco.simulator.contents.Backend`."""

  def __init__(self, lab: ArrayBackend, answers: Answers):
    self.lab = lab
    self.answers = answers
    self.first_crcs = lab.first_crcs
    self._numbers = itertools.count()
    self._living = weakref.WeakValueDictionary()  # By number.

  def learner(
    self, learner: int, start: Start, saved: Stub | None
  ) -> 'StubLearner':
    """Makes a learner's contents; see `diloco.simulator.contents.Backend`."""
    made = StubLearner(self, learner, start)
    if not self.answers.replaying:
      value = saved.value if saved is not None else None
      made.arrays = self.lab.learner(learner, start, value)
    return self._numbered(made)

  def syncer(self, crcs: tuple[int, ...], saved: Stub | None) -> 'StubSyncer':
    """Makes the syncer's contents; see `diloco.simulator.contents.Backend`."""
    made = StubSyncer(self, crcs)
    if not self.answers.replaying:
      value = saved.value if saved is not None else None
      made.arrays = self.lab.syncer(crcs, value)
    return self._numbered(made)

  def made(self, work: Callable[[], Any]) -> Stub:
    """Returns a stub of the result of `work`, or one without a value."""
    return self._numbered(Stub(None if self.answers.replaying else work()))

  def do(self, work: Callable[[], Any]):
    """Calls `work` unless the arrays are away."""
    if not self.answers.replaying:
      work()

  @property
  def likes(self) -> Likes:
    """The structure of the arrays; see `Likes`."""
    return self.lab.likes

  def state(self) -> dict[int, Any]:
    """Returns all that is still needed, by number."""
    return {n: each.state() for n, each in self._needed()}

  def go_on(self, state: Mapping[int, Any]):
    """Gives every stub its arrays of this very moment.

    Raises:
      Diverged: some that are needed were not saved.
    """
    needed = self._needed()
    missing = {n for n, _ in needed} - state.keys()
    if missing:
      raise Diverged(f'the arrays {sorted(missing)} were not saved')
    for n, each in needed:
      each.go_on(state[n])

  def _numbered(self, each):
    self._living[next(self._numbers)] = each
    return each

  def _needed(self) -> list[tuple[int, Any]]:
    """Returns what is needed; cycles of callbacks must be collected first."""
    gc.collect()
    return sorted(self._living.items(), key=lambda item: item[0])


class _StubArrays:
  """Arrays that can be away, and the calls that are passed on to them.

  Attributes:
    arrays: the real ones; None while they are away.
  """

  def __init__(self, backend: StubBackend):
    self.arrays: Any = None
    self._backend = backend

  def _call(self, method: str, *args) -> Any:
    values = (x.value if isinstance(x, Stub) else x for x in args)
    return getattr(self.arrays, method)(*values)

  def _make(self, method: str, *args) -> Stub:
    """Returns a stub of what the arrays' method makes."""
    return self._backend.made(lambda: self._call(method, *args))

  def _do(self, method: str, *args):
    self._backend.do(lambda: self._call(method, *args))

  def fragment(self, p: int) -> Stub:
    return self._make('fragment', p)

  def save(self) -> Stub:
    return self._make('save')


class StubLearner(_StubArrays):
  """An implementation of `diloco.simulator.contents.LearnerBackend`."""

  def __init__(self, backend: StubBackend, learner: int, start: Start):
    super().__init__(backend)
    self.versions = list(start.versions)
    self.crcs = list(start.crcs)
    self.base_crcs = list(start.crcs)
    self._learner = learner
    self._start = start

  def step(self, position: int, progress: int) -> float:
    return self._backend.answers.of(
      f'step {self._learner}', lambda: self.arrays.step(position, progress)
    )

  def snapshot(self, effect: learner_events.Snapshot) -> Stub:
    return self._make('snapshot', effect)

  def offer(self, effect: learner_events.Snapshot, copy: Stub) -> Stub:
    return self._make('offer', effect, copy)

  def donate(self) -> Stub:
    return self._make('donate')

  def adopt(self, offered: messages.StateOffered, donated: Stub):
    self._do('adopt', offered, donated)
    self.versions, self.crcs = list(offered.versions), list(offered.crcs)

  def adopt_inner(self):
    self._do('adopt_inner')

  def reset_inner(self):
    self._do('reset_inner')

  def update(self, p: int, version: int, data: Stub, crc: int) -> str | None:
    return self._taken_in('update', p, version, data, crc)

  def replace(self, p: int, version: int, data: Stub, crc: int) -> str | None:
    return self._taken_in('replace', p, version, data, crc)

  def _taken_in(
    self, method: str, p: int, version: int, data: Stub, crc: int
  ) -> str | None:
    """Notes version and CRC after bytes were verified."""
    reason = self._backend.answers.of(
      f'take in {self._learner}',
      lambda: self._call(method, p, version, data, crc),
    )
    if reason is None:
      self.versions[p], self.crcs[p] = version, crc
    return reason

  def apply(self, effect: learner_events.Apply, training: bool):
    self._do('apply', effect, training)
    self.base_crcs[effect.fragment] = self.crcs[effect.fragment]

  def state(self) -> dict[str, Any]:
    """Returns the arrays' state, which must agree with what is known here."""
    mine = self.versions, self.crcs, self.base_crcs
    theirs = self.arrays.versions, self.arrays.crcs, self.arrays.base_crcs
    assert mine == theirs, f'learner {self._learner}: {mine=}, {theirs=}'
    return self.arrays.state()

  def go_on(self, state: Mapping[str, Any]):
    lab = self._backend.lab
    self.arrays = lab.learner(self._learner, self._start, None)
    self.arrays.go_on(state)


class StubSyncer(_StubArrays):
  """An implementation of `diloco.simulator.contents.SyncerBackend`."""

  def __init__(self, backend: StubBackend, crcs: tuple[int, ...]):
    super().__init__(backend)
    self.crcs = list(crcs)

  def take(self, offer: messages.Offer) -> tuple[Stub, float]:
    taken = None

    def decode() -> list:
      nonlocal taken
      try:
        taken, norm = self._call('decode', offer.fragment, offer.payload.data)
      except RefusedContribution as error:
        return [None, str(error)]
      return [norm, None]

    norm, reason = self._backend.answers.of('take', decode)
    if reason is not None:
      raise RefusedContribution(reason)
    return self._backend.made(lambda: taken), norm

  def merge(self, merge: syncer_events.Merge, taken: Mapping[int, Stub]):
    self._backend.do(
      lambda: self.arrays.merge(merge, {m: x.value for m, x in taken.items()})
    )

  def publish(self, p: int, version: int) -> Stub:
    data = self._make('publish', p, version)
    self._learn_crc(p)
    return data

  def take_fragment(self, p: int, version: int, data: Stub, crc: int):
    self._do('take_fragment', p, version, data, crc)
    self._learn_crc(p)

  def relabel(self, p: int, version: int):
    self._do('relabel', p, version)

  def state(self) -> dict[str, Any]:
    assert self.crcs == self.arrays.crcs, f'{self.crcs=} {self.arrays.crcs=}'
    return self.arrays.state()

  def go_on(self, state: Mapping[str, Any]):
    lab = self._backend.lab
    self.arrays = lab.syncer(lab.first_crcs, None)
    self.arrays.go_on(state)

  def _learn_crc(self, p: int):
    self.crcs[p] = self._backend.answers.of(
      f'crc {p}', lambda: self.arrays.crcs[p]
    )
