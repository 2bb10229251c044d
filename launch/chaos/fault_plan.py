# SPDX-License-Identifier: Apache-2.0
"""A seeded plan of faults: kinds, moments, targets and durations; pure."""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from diloco.config.sections import ConfigError
from diloco.faults import (
  CLOCK_JUMP_S,
  HOST,
  LEARNER,
  MEMBER,
  NEWCOMER,
  SERVER,
  SLICE,
  WAYS,
  Fault,
  Kind,
)
from diloco.fleets.failures import Interruption
from diloco.metrics.workdir import learner_name

QUIET_END_S = 10.0  # Without a new fault, at the end.
BETWEEN_S = 2.0  # From one fault to the next, at least.
RECOVERY_S = 15.0  # Until a target can be hit again.
STAYS_S = 100.0  # A newcomer that is to leave does so within this time.
AWAY, KILL = 'slice_away', 'kill'  # What befalls a fleet.
TRIES = 200  # Moments at which a fault is tried to be placed.


@dataclasses.dataclass(frozen=True)
class FaultTargets:
  """The processes that a plan may hit.

  Attributes:
    learners: M, those of the configuration.
    ids_max: ids that a learner can have.
    servers: the syncer and its shards, by name.
    hosts: processes of each learner.
    slices: that share them, of each learner; (): one each.
  """

  learners: int
  ids_max: int
  servers: tuple[str, ...]
  hosts: tuple[int, ...]
  slices: tuple[int, ...] = ()


def draw(
  seed: int,
  seconds: float,
  faults_per_hour: float,
  shapes: Mapping[str, Kind],
  cast: FaultTargets,
) -> tuple[Fault, ...]:
  """Returns the plan of a seed.

  Each kind comes as often as the others. No process is hit again before it had
  time to recover, and one learner at least is left alone at any time.

  Args:
    faults_per_hour: their mean rate; round(rate · time) come.
    shapes: of the kinds that are asked for.
    cast: the processes of the run.

  Raises:
    ConfigError: they do not fit; or a kind can befall no process of this run.
  """
  for name, shape in shapes.items():
    if not can_befall(shape, cast):
      raise ConfigError([f'--kinds={name}: no process of this run can be hit'])
  rng, places = np.random.default_rng(seed), _Places(seconds, cast)
  many = round(faults_per_hour * seconds / 3600)
  for kind in _dealt(many, shapes, rng):
    if not places.put(kind, shapes[kind], rng):
      raise ConfigError(
        [
          f'--faults_per_hour={faults_per_hour:g}: {many} faults in '
          f'{seconds / 60:g} minutes do not fit, as each process gets '
          f'{RECOVERY_S:.0f} s to recover, and data.shards={cast.ids_max} lets '
          f'{cast.ids_max - cast.learners} learners join'
        ]
      )
  return places.plan()


def of_fleet(
  interruptions: Iterable[Interruption],
  seconds: float,
  shapes: Mapping[str, Kind],
  cast: FaultTargets,
) -> tuple[Fault, ...]:
  """Returns the plan of what befalls a fleet, which learners share evenly.

  Each interruption takes a slice away until it is repaired; a learner of one
  slice is killed, and comes back when it has started. One that hits a learner
  which is not whole again costs nothing more, and is left out, as in
  `fleets.failures`; so is one that would leave no learner alone.

  Args:
    shapes: of `AWAY` and `KILL`.
  """
  places = _Places(seconds, cast)
  for each in interruptions:
    learner = int(each.place * cast.learners)
    target, at_s = learner_name(learner), round(each.at_s, 3)
    fault = Fault(0, at_s, KILL, target)
    if cast.slices and (slices := cast.slices[learner]) > 1:
      which = int((each.place * cast.learners - learner) * slices)
      first = which * (cast.hosts[learner] // slices)
      repair_s = round(each.repair_s, 3)
      fault = Fault(0, at_s, AWAY, f'{target}.{first}', repair_s)
    places.place(fault, shapes[fault.kind])
  return places.plan()


def _dealt(
  many: int, shapes: Mapping[str, Kind], rng: np.random.Generator
) -> list[str]:
  """Returns the kinds in the order in which they are to be placed.

  Learners come and go first, each newcomer before the next leaves: later
  faults are then placed on those that are there.
  """
  kinds: list[str] = []
  while shapes and len(kinds) < many:
    deck = [str(kind) for kind in rng.permutation(sorted(shapes))]
    deck.sort(key=lambda kind: NEWCOMER not in shapes[kind].targets)
    kinds += deck[: many - len(kinds)]
  return sorted(
    kinds, key=lambda kind: not {NEWCOMER, MEMBER} & set(shapes[kind].targets)
  )


def can_befall(shape: Kind, cast: FaultTargets) -> bool:
  """Returns True if it can befall a process of this run at some time."""
  there = {
    LEARNER: cast.learners > 0,
    SERVER: bool(cast.servers),
    HOST: max(cast.hosts, default=1) > 1,
    SLICE: max(cast.slices, default=1) > 1,
    NEWCOMER: cast.ids_max > cast.learners,
    MEMBER: cast.learners > 1,
  }
  return any(there[which] for which in shape.targets)


class _Places:
  """Faults that were placed, and where another one fits."""

  def __init__(self, seconds: float, cast: FaultTargets):
    self._seconds = seconds
    self._cast = cast
    self._faults: list[Fault] = []
    self._left: dict[str, float] = {}  # When a learner left for good.
    self._joined: dict[str, float] = {}  # When one that is new has joined.

  def put(self, kind: str, shape: Kind, rng: np.random.Generator) -> bool:
    """Places one; returns False if no place was found."""
    last_s = self._seconds - QUIET_END_S - shape.hold_s[1]
    if last_s <= 0:
      return False
    for _ in range(TRIES):
      at_s = round(self._draw_s(shape, last_s, rng), 3)
      hold_s = round(float(rng.uniform(*shape.hold_s)), 3)
      targets = self._targets(shape, at_s, at_s + hold_s)
      if not targets or self._is_crowded(at_s):
        continue
      target = str(rng.choice(targets))
      way = ''
      if shape.one_way:
        way = str(rng.choice(WAYS))
      if self._add(Fault(0, at_s, kind, target, hold_s, way), shape):
        return True
    return False

  def place(self, fault: Fault, shape: Kind) -> bool:
    """Places this one; returns False if its target is not there and whole."""
    ends_in_time = fault.end_s <= self._seconds - QUIET_END_S
    free = self._is_free(fault.process, fault.at_s, fault.end_s)
    return ends_in_time and free and self._add(fault, shape)

  def _add(self, fault: Fault, shape: Kind) -> bool:
    if not self._spares_one([*self._faults, fault], shape):
      return False
    if MEMBER in shape.targets:
      self._left[fault.target] = fault.at_s
    if NEWCOMER in shape.targets:
      self._joined[fault.target] = fault.at_s
    self._faults.append(fault)
    return True

  def _draw_s(
    self, shape: Kind, last_s: float, rng: np.random.Generator
  ) -> float:
    """Draws a moment; a newcomer leaves soon, or ever more would be there."""
    if NEWCOMER in shape.targets:  # And leaves before the end.
      return float(rng.uniform(0, max(last_s / 2, last_s - STAYS_S)))
    staying = (s for m, s in self._joined.items() if m not in self._left)
    begin_s = min(staying, default=last_s) + RECOVERY_S
    if MEMBER in shape.targets and begin_s < last_s:
      return float(rng.uniform(begin_s, min(last_s, begin_s + STAYS_S)))
    return float(rng.uniform(0, last_s))

  def plan(self) -> tuple[Fault, ...]:
    """Returns all faults in the order of time, numbered."""
    ordered = sorted(self._faults, key=lambda fault: fault.at_s)
    return tuple(
      dataclasses.replace(
        fault,
        number=number,
        jump_s=CLOCK_JUMP_S if number % 2 == 0 else -CLOCK_JUMP_S,
      )
      for number, fault in enumerate(ordered, start=1)
    )

  def _is_crowded(self, at_s: float) -> bool:
    times_s = sorted(fault.at_s for fault in self._faults)
    place = bisect.bisect(times_s, at_s)
    near = times_s[max(0, place - 1) : place + 1]
    return any(abs(each - at_s) < BETWEEN_S for each in near)

  def _targets(self, shape: Kind, begin_s: float, end_s: float) -> list[str]:
    """Returns the processes that it can befall then."""
    cast, names = self._cast, []
    if SERVER in shape.targets:
      names += [s for s in cast.servers if self._is_free(s, begin_s, end_s)]
    if NEWCOMER in shape.targets:
      unused = cast.learners + len(self._joined)
      names += [learner_name(unused)] if unused < cast.ids_max else []
    members = [m for m in self._members() if self._is_free(m, begin_s, end_s)]
    if LEARNER in shape.targets:
      names += members
    if HOST in shape.targets:
      names += [
        f'{learner_name(m)}.{host}'
        for m, hosts in enumerate(cast.hosts)
        for host in range(1, hosts)
        if learner_name(m) in members
      ]
    if SLICE in shape.targets:
      names += [
        f'{learner_name(m)}.{host}'
        for m, (hosts, slices) in enumerate(zip(cast.hosts, cast.slices))
        for host in range(0, hosts, hosts // slices)
        if slices > 1 and learner_name(m) in members
      ]
    if MEMBER in shape.targets:
      names += self._dispensable(members, begin_s)
    return names

  def _members(self) -> list[str]:
    own = [learner_name(m) for m in range(self._cast.learners)]
    return own + sorted(self._joined)

  def _dispensable(self, members: Sequence[str], at_s: float) -> list[str]:
    """Returns those that can leave for good: newcomers, if there are some."""
    later = [fault.process for fault in self._faults if fault.end_s >= at_s]
    able = [m for m in members if m not in later and m not in self._left]
    new = [m for m in able if m in self._joined]
    stays = self._cast.learners - len(self._left)
    return new or (able if stays > 2 else [])

  def _is_free(self, target: str, begin_s: float, end_s: float) -> bool:
    """Returns True if a process is there, and hit by nothing else."""
    if begin_s < self._joined.get(target, -RECOVERY_S) + RECOVERY_S:
      return False
    if end_s + RECOVERY_S > self._left.get(target, float('inf')):
      return False
    return not any(
      fault.process == target
      and begin_s < fault.end_s + RECOVERY_S
      and fault.at_s < end_s + RECOVERY_S
      for fault in self._faults
    )

  def _spares_one(self, faults: Sequence[Fault], shape: Kind) -> bool:
    """Returns True if a learner is left alone at any time.

    Args:
      faults: all that are placed, and at last the one that is to be.
      shape: of the last one.
    """
    left, joined = dict(self._left), dict(self._joined)
    if MEMBER in shape.targets:
      left[faults[-1].target] = faults[-1].at_s
    own = {learner_name(m) for m in range(self._cast.learners)}
    # A learner becomes hit at these moments only.
    for at_s in (fault.at_s for fault in faults):
      new = {m for m, since_s in joined.items() if since_s + RECOVERY_S <= at_s}
      gone = {m for m, since_s in left.items() if since_s <= at_s}
      hit = {
        fault.process
        for fault in faults
        if fault.at_s <= at_s <= fault.end_s + RECOVERY_S
      }
      if not (own | new) - gone - hit:
        return False
    return True
