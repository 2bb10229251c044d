# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults: one table, which every driver performs or refuses.

A kind says in verbs of a `FaultStage` what happens. Three stages perform them:
real processes (`launch.chaos.stage`), the simulated twin of such a run
(`diloco.prediction.twin`), and the swarm (`diloco.simulator.swarm`). A stage
without a verb refuses the kinds that need it, by name. `config.faults` names a
kind as well ('kill learner 1 at 0.33'), and so do the recorded faults of a run.
"""

import dataclasses
from typing import Any, Protocol

# What a fault can befall.
LEARNER = 'learner'
SERVER = 'syncer'  # The syncer, and its shards.
HOST = 'host'  # One process of a learner of several hosts.
SLICE = 'slice'  # One of a learner's slices, named as its first host is.
NEWCOMER = 'newcomer'  # An id that was not there before.
MEMBER = 'member'  # A learner, which does not come back.

UP, DOWN = 'up', 'down'  # From a learner, and to it.
WAYS = (UP, DOWN)
NOTICE_S = 5.0  # From SIGTERM, in which a learner leaves in good order.
SLOWER = 2.0  # Factor on the time of a step.
THROTTLED_SHARE = 0.25  # Of what a link carries in calm.
DELAY_S = (0.05, 0.15)
LOSS = 0.1
CLOCK_JUMP_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Fault:
  """One fault of a plan or of a scenario."""

  number: int  # From 1, in the order of time; 0: it has none.
  at_s: float  # Since the begin of the plan.
  kind: str
  target: str  # 'syncer', 'shard-1', 'learner-0', or its host 'learner-0.1'.
  hold_s: float = 0.0
  way: str = ''  # 'up', 'down'; '': it befalls no link, or both ways.
  notice_s: float = NOTICE_S
  jump_s: float = CLOCK_JUMP_S

  @property
  def end_s(self) -> float:
    return self.at_s + self.hold_s

  @property
  def process(self) -> str:
    """The learner or process of the syncer that it befalls, by name."""
    return self.target.partition('.')[0]

  @property
  def learner(self) -> int | None:
    """The id of the learner that it befalls; None: a process of the syncer."""
    return number_of(self.target) if self.target.startswith(LEARNER) else None

  @property
  def ways(self) -> tuple[str, ...]:
    return (self.way,) if self.way else WAYS

  def __str__(self) -> str:
    way = f', {self.way}' if self.way else ''
    hold = f' for {self.hold_s:.1f} s' if self.hold_s else ''
    return f'{self.at_s:6.1f} s  {self.kind} {self.target}{way}{hold}'


def number_of(target: str) -> int:
  """Returns N of 'learner-N', 'learner-N.host' or 'shard-N'."""
  return int(target.partition('.')[0].rpartition('-')[2])


@dataclasses.dataclass(frozen=True)
class Impairment:
  """An impairment of one way of a link; the default is none.

  Attributes:
    cut: nothing comes through; what was sent arrives later.
    bytes_per_s: rate; None: unlimited.
    delay_s: bounds between which each chunk's latency is drawn.
    loss: probability that a chunk is lost.
  """

  cut: bool = False
  bytes_per_s: float | None = None
  delay_s: tuple[float, float] = (0.0, 0.0)
  loss: float = 0.0


SOUND = Impairment()
CUT = Impairment(cut=True)
LATE = Impairment(delay_s=DELAY_S)
LOSSY = Impairment(loss=LOSS)


class FaultStage(Protocol):
  """Processes that can be hit; a stage need not have every verb."""

  NAME: str  # As refusals have it.

  def kill(self, target: str) -> None:
    """SIGKILL; the launcher starts it again."""

  def kill_donor(self, target: str) -> None:
    """SIGKILL for a learner that gives its state, else for the target."""

  def kill_slice(self, target: str) -> None:
    """SIGKILL for all of a slice; the launcher takes it back later."""

  def lose_slice(self, target: str) -> None:
    """The same, and it stays away."""

  def return_slice(self, target: str) -> None:
    """Takes back all slices of a learner."""

  def pause(self, target: str) -> None:
    """SIGSTOP."""

  def go_on(self, target: str) -> None:
    """SIGCONT."""

  def preempt(self, target: str, notice_s: float) -> None:
    """SIGTERM with notice; the launcher starts it again."""

  def preempt_and_kill(self, target: str, notice_s: float) -> None:
    """The same, and SIGKILL when the notice is over."""

  def dismiss(self, target: str, notice_s: float) -> None:
    """SIGTERM with notice; it does not come back."""

  def join(self, target: str) -> None:
    """Starts a learner of a new id."""

  def slow(self, target: str, is_slow: bool) -> None:
    """Makes the steps of a learner take `SLOWER` times as long, or not."""

  def cut(self, target: str, ways: tuple[str, ...]) -> None:
    """Lets a learner's link carry nothing on these ways; streams stay open."""

  def impair(self, target: str, impairment: Impairment) -> None:
    """Sets what is wrong with a learner's link, both ways."""

  def throttle(self, target: str) -> None:
    """Lets a link carry `THROTTLED_SHARE` of what it carried in calm."""

  def mend(self, target: str) -> None:
    """Heals a learner's link."""

  def partition(self, target: str) -> None:
    """Cuts a learner off, so that its streams break on both sides."""

  def fill_disk(self, target: str, is_full: bool) -> None:
    """Lets no file of a process grow, or again."""

  def lose_disk(self, target: str) -> None:
    """Deletes the folder of a dead process."""

  def set_clock(self, target: str, jump_s: float) -> None:
    """Lets the clock jump by which a learner's next process is numbered."""

  def spoil(self, target: str, offers: str) -> None:
    """Makes a learner's offers 'outliers' or 'unusable'."""


# What is called of a stage: the verb, and arguments after the target. A name
# of `FIELDS` stands for that field of the fault.
Call = tuple[Any, ...]
FIELDS = 'ways', 'notice_s', 'jump_s'


@dataclasses.dataclass(frozen=True)
class Kind:
  """One kind of fault.

  Attributes:
    what: it in a few words, with its parameters.
    targets: which of the above it can befall.
    begin: performs it.
    end: ends it, after its time; (): it needs no end.
    hold_s: bounds of how long it lasts; (0, 0): it is a moment.
    one_way: it befalls one way of a link.
    counters: fields of `relay.WayCounts` of which one must have moved, or it
      did nothing.
    is_outage: True if its target's process ends.
  """

  what: str
  targets: tuple[str, ...]
  begin: Call
  end: Call = ()
  hold_s: tuple[float, float] = (0.0, 0.0)
  _: dataclasses.KW_ONLY
  one_way: bool = False
  counters: tuple[str, ...] = ()
  is_outage: bool = False

  @property
  def verbs(self) -> tuple[str, ...]:
    """The verbs of a `FaultStage` that it needs."""
    return (*self.begin[:1], *self.end[:1])


HELD = ('held_bytes', 'held_connects')
MEND = ('mend',)
KINDS = {
  'kill': Kind(
    'kill -9 of a learner, the syncer or a shard',
    (LEARNER, SERVER),
    ('kill',),
    is_outage=True,
  ),
  'kill_host': Kind(
    'kill -9 of one process of a learner of several hosts',
    (HOST,),
    ('kill',),
    is_outage=True,
  ),
  'kill_slice': Kind(
    'kill -9 of a slice, whose learner goes on without it',
    (SLICE,),
    ('kill_slice',),
    is_outage=True,
  ),
  'slice_away': Kind(
    'the same, and the slice stays away',
    (SLICE,),
    ('lose_slice',),
    ('return_slice',),
    (20.0, 60.0),
    is_outage=True,
  ),
  'kill_donor': Kind(
    'kill -9 of the learner that gives a newcomer its state',
    (LEARNER,),
    ('kill_donor',),
    is_outage=True,
  ),
  'pause': Kind(
    'SIGSTOP, and SIGCONT later',
    (LEARNER, SERVER),
    ('pause',),
    ('go_on',),
    (2.0, 6.0),
  ),
  'preempt': Kind(
    f'SIGTERM with {NOTICE_S:g} s of notice',
    (LEARNER,),
    ('preempt', 'notice_s'),
    is_outage=True,
  ),
  'short_notice': Kind(
    'SIGTERM, and SIGKILL when the notice is over',
    (LEARNER,),
    ('preempt_and_kill', 'notice_s'),
    is_outage=True,
  ),
  'cut': Kind(
    'a link that carries nothing',
    (LEARNER,),
    ('cut', 'ways'),
    MEND,
    (3.0, 8.0),
    counters=HELD,
  ),
  'cut_one_way': Kind(
    'a link that carries nothing one way',
    (LEARNER,),
    ('cut', 'ways'),
    MEND,
    (3.0, 8.0),
    one_way=True,
    counters=HELD,
  ),
  'partition': Kind(
    'a learner that no process reaches, whose streams break',
    (LEARNER,),
    ('partition',),
  ),
  'throttle': Kind(
    f'a link of {THROTTLED_SHARE:.0%} of its usual rate',
    (LEARNER,),
    ('throttle',),
    MEND,
    (5.0, 10.0),
    counters=('throttled_bytes',),
  ),
  'delay': Kind(
    f'{DELAY_S[0] * 1000:.0f} to {DELAY_S[1] * 1000:.0f} ms more each way',
    (LEARNER,),
    ('impair', LATE),
    MEND,
    (5.0, 10.0),
    counters=('delayed_bytes',),
  ),
  'loss': Kind(
    f'{LOSS:.0%} of the chunks stall as if lost, a few end their connection',
    (LEARNER,),
    ('impair', LOSSY),
    MEND,
    (5.0, 10.0),
    counters=('stalls', 'resets'),
  ),
  'slow': Kind(
    f'a learner that slows down by a factor of {SLOWER:g}',
    (LEARNER,),
    ('slow', True),
    ('slow', False),
    (6.0, 12.0),
  ),
  'join': Kind('a learner of a new id', (NEWCOMER,), ('join',)),
  'leave': Kind(
    f'a learner that leaves for good, with {NOTICE_S:g} s of notice',
    (MEMBER,),
    ('dismiss', 'notice_s'),
    is_outage=True,
  ),
  'disk': Kind(
    'a disk that takes nothing more, of the syncer or a learner',
    (LEARNER, SERVER),
    ('fill_disk', True),
    ('fill_disk', False),
    (3.0, 6.0),
  ),
  'lose_disk': Kind(
    'the folder of a dead syncer is gone, with its ledger',
    (SERVER,),
    ('lose_disk',),
  ),
  'clock': Kind(
    'the clock of a learner, by which its next process is numbered, jumps',
    (LEARNER,),
    ('set_clock', 'jump_s'),
    is_outage=True,
  ),
  'outlier': Kind(
    'offers whose norm is 1000 times the usual one',
    (LEARNER,),
    ('spoil', 'outliers'),
  ),
  'unusable': Kind(
    'offers of values that are not finite', (LEARNER,), ('spoil', 'unusable')
  ),
}


class RefusedFault(ValueError):
  """A stage has not the verbs of a kind; the message names both."""


def performed_by(stage: type[FaultStage] | FaultStage) -> dict[str, Kind]:
  """Returns the kinds for which a stage has all verbs, by name."""
  return {
    name: kind
    for name, kind in KINDS.items()
    if all(hasattr(stage, verb) for verb in kind.verbs)
  }


def begin(stage: FaultStage, fault: Fault) -> None:
  """Performs a fault.

  Raises:
    RefusedFault: it is of no kind that the stage performs.
  """
  check(stage, fault.kind)
  _call(stage, fault, KINDS[fault.kind].begin)


def end(stage: FaultStage, fault: Fault) -> None:
  """Ends a fault that was performed."""
  _call(stage, fault, KINDS[fault.kind].end)


def _call(stage: FaultStage, fault: Fault, call: Call) -> None:
  if call:
    verb, *more = call
    more = [getattr(fault, x) if x in FIELDS else x for x in more]
    getattr(stage, verb)(fault.target, *more)


def check(stage: type[FaultStage] | FaultStage, kind: str) -> None:
  """Raises `RefusedFault` for a kind that a stage does not perform."""
  performed = performed_by(stage)
  if kind not in performed:
    raise RefusedFault(
      f'{kind}: {stage.NAME} perform {", ".join(performed)}, not this'
    )


def adds(kind: str) -> bool:
  """Returns True if its target is a learner that was not there before."""
  return NEWCOMER in KINDS[kind].targets


def removes(kind: str) -> bool:
  """Returns True if its target does not come back."""
  return MEMBER in KINDS[kind].targets
