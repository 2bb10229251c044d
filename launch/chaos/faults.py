# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults: what each is, on real and on simulated processes.

A kind says in verbs of a `FaultStage` what happens; one stage has real
processes (`stage`), the other one simulated ones (`simulated`). Link faults
name the counters of the relay that must have moved, or the fault did nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from launch.chaos.fault_plan import (
  HOST,
  LEARNER,
  MEMBER,
  NEWCOMER,
  SERVER,
  PlannedFault,
  Shape,
)
from launch.chaos.relay import WAYS, Impairment

NOTICE_S = 5.0  # From SIGTERM, in which a learner leaves in good order.
SLOWER = 2.0  # Factor on the time of a step.
THROTTLED_SHARE = 0.25  # Of what a link carries in calm.
THROTTLED_BYTES_PER_S_MIN = 2000.0
DELAY_S = (0.05, 0.15)
LOSS = 0.1
CLOCK_JUMP_S = 3600.0
CUT = Impairment(cut=True)
LATE = Impairment(delay_s=DELAY_S)
LOSSY = Impairment(loss=LOSS)


class FaultStage(Protocol):
  """Processes that can be hit; each verb takes the name of one."""

  def kill(self, target: str) -> None:
    """SIGKILL; the launcher starts it again."""

  def pause(self, target: str) -> None:
    """SIGSTOP."""

  def go_on(self, target: str) -> None:
    """SIGCONT."""

  def preempt(self, target: str) -> None:
    """SIGTERM with `NOTICE_S`; the launcher starts it again."""

  def dismiss(self, target: str) -> None:
    """SIGTERM with `NOTICE_S`; it does not come back."""

  def join(self, target: str) -> None:
    """Starts a learner of a new id."""

  def slow(self, target: str, is_slow: bool) -> None:
    """Makes the steps of a learner take `SLOWER` times as long, or not."""

  def impair(
    self, target: str, ways: tuple[str, ...], impairment: Impairment | None
  ) -> None:
    """Sets what is wrong with a learner's link; None heals it."""

  def throttle(self, target: str) -> None:
    """Lets a link carry `THROTTLED_SHARE` of what it carried in calm."""

  def fill_disk(self, target: str, is_full: bool) -> None:
    """Lets no file of a process grow, or again."""

  def set_clock(self, target: str, wrong_s: float) -> None:
    """Sets the wall clock of a learner wrong by so much."""


Act = Callable[[FaultStage, PlannedFault], None]


def _nothing(stage: FaultStage, fault: PlannedFault) -> None:
  """A fault that needs no end."""


def _heal(stage: FaultStage, fault: PlannedFault) -> None:
  stage.impair(fault.target, WAYS, None)


def _jump(stage: FaultStage, fault: PlannedFault) -> None:
  stage.set_clock(fault.target, jump_s(fault))
  stage.kill(fault.target)  # A process takes its number from the clock once.


@dataclasses.dataclass(frozen=True)
class Kind:
  """One kind of fault.

  Attributes:
    what: it in a few words.
    shape: the processes that it can befall, and its duration.
    begin: performs it.
    end: ends it, after its time.
    counters: fields of `relay.WayCounts` of which one must have moved.
    is_outage: True if its target's process ends.
  """

  what: str
  shape: Shape
  begin: Act
  end: Act = _nothing
  counters: tuple[str, ...] = ()
  is_outage: bool = False


KINDS = {
  'kill': Kind(
    'kill -9 of a learner, the syncer or a shard',
    Shape((LEARNER, SERVER)),
    lambda stage, fault: stage.kill(fault.target),
    is_outage=True,
  ),
  'kill_host': Kind(
    'kill -9 of one process of a learner of several hosts',
    Shape((HOST,)),
    lambda stage, fault: stage.kill(fault.target),
    is_outage=True,
  ),
  'pause': Kind(
    'SIGSTOP, and SIGCONT later',
    Shape((LEARNER, SERVER), (2.0, 6.0)),
    lambda stage, fault: stage.pause(fault.target),
    lambda stage, fault: stage.go_on(fault.target),
  ),
  'preempt': Kind(
    'SIGTERM with notice',
    Shape((LEARNER,)),
    lambda stage, fault: stage.preempt(fault.target),
    is_outage=True,
  ),
  'cut': Kind(
    'a link that carries nothing',
    Shape((LEARNER,), (3.0, 8.0)),
    lambda stage, fault: stage.impair(fault.target, WAYS, CUT),
    _heal,
    ('held_bytes', 'held_connects'),
  ),
  'cut_one_way': Kind(
    'a link that carries nothing one way',
    Shape((LEARNER,), (3.0, 8.0), one_way=True),
    lambda stage, fault: stage.impair(fault.target, (fault.way,), CUT),
    _heal,
    ('held_bytes', 'held_connects'),
  ),
  'throttle': Kind(
    f'a link of {THROTTLED_SHARE:.0%} of its usual rate',
    Shape((LEARNER,), (5.0, 10.0)),
    lambda stage, fault: stage.throttle(fault.target),
    _heal,
    ('throttled_bytes',),
  ),
  'delay': Kind(
    f'{DELAY_S[0] * 1000:.0f} to {DELAY_S[1] * 1000:.0f} ms more each way',
    Shape((LEARNER,), (5.0, 10.0)),
    lambda stage, fault: stage.impair(fault.target, WAYS, LATE),
    _heal,
    ('delayed_bytes',),
  ),
  'loss': Kind(
    f'{LOSS:.0%} of the chunks stall as if lost, a few end their connection',
    Shape((LEARNER,), (5.0, 10.0)),
    lambda stage, fault: stage.impair(fault.target, WAYS, LOSSY),
    _heal,
    ('stalls', 'resets'),
  ),
  'slow': Kind(
    f'a learner that slows down by a factor of {SLOWER:g}',
    Shape((LEARNER,), (6.0, 12.0)),
    lambda stage, fault: stage.slow(fault.target, True),
    lambda stage, fault: stage.slow(fault.target, False),
  ),
  'join': Kind(
    'a learner of a new id',
    Shape((NEWCOMER,)),
    lambda stage, fault: stage.join(fault.target),
  ),
  'leave': Kind(
    'a learner that leaves for good',
    Shape((MEMBER,)),
    lambda stage, fault: stage.dismiss(fault.target),
    is_outage=True,
  ),
  'disk': Kind(
    'a disk that takes nothing more, of the syncer or a learner',
    Shape((LEARNER, SERVER), (3.0, 6.0)),
    lambda stage, fault: stage.fill_disk(fault.target, True),
    lambda stage, fault: stage.fill_disk(fault.target, False),
  ),
  'clock': Kind(
    'the clock of a learner, by which its next process is numbered, jumps',
    Shape((LEARNER,)),
    _jump,
    is_outage=True,
  ),
}


def jump_s(fault: PlannedFault) -> float:
  """Returns by how much a clock is wrong: alternately behind and ahead."""
  return CLOCK_JUMP_S if fault.number % 2 == 0 else -CLOCK_JUMP_S


def adds(kind: str) -> bool:
  """Returns True if its target is a learner that was not there before."""
  return NEWCOMER in KINDS[kind].shape.befalls


def removes(kind: str) -> bool:
  """Returns True if its target does not come back."""
  return MEMBER in KINDS[kind].shape.befalls


def outage(kind: str) -> bool:
  """Returns True if its target's process ends."""
  return KINDS[kind].is_outage
