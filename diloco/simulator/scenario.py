# SPDX-License-Identifier: Apache-2.0
"""Draws a scenario from a seed: a run, its cluster and its faults.

Seeds below `WIDE_FROM` keep their draws for ever, so that `seeds.txt` stays
valid: equal links, fragments of one size, at most four learners. From there on,
a scenario is wide: all that has a default may be drawn, and from
`BURDENED_FROM` on, in some, a link on which updates take longer than rounds, or
many learners and a restart of the syncer. From `SLICED_FROM` on, in half of
them, learners have several slices, which are lost and come back.
"""

import dataclasses
import random
from collections.abc import Mapping

from diloco.faults import WAYS, Fault
from diloco.metrics.workdir import learner_name, shard_name
from diloco.protocol import timeouts
from diloco.protocol.config import ADMISSIONS, BLENDS, ProtocolConfig
from diloco.simulator.cluster import Timing
from diloco.simulator.network import USUAL, LinkDeviation, UnequalWires

WIDE_FROM = 10**8
BURDENED_FROM = 10**14
SLICED_FROM = 10**15
TOO_SLOW = (1.05, 3.0)  # Time of an update, by that of a round.
CALM_ROUNDS = 20  # Before the first fault, if a link is too slow.
SYNCER_NAME = 'syncer'
NEW = 'newcomer'  # An id that was not seen before.
# Kind, its target ('': a drawn learner), weight. Their order is that of the
# draws: what a seed means depends on it.
FAULTS = (
  ('kill', '', 6),
  ('kill_donor', '', 3),
  ('pause', '', 4),
  ('partition', '', 4),
  ('preempt', '', 3),
  ('outlier', '', 2),
  ('unusable', '', 2),
  ('join', NEW, 3),
  ('kill', SYNCER_NAME, 5),
  ('pause', SYNCER_NAME, 3),
  ('lose_disk', SYNCER_NAME, 1),
)
WIDE_FAULTS = (
  ('cut', '', 4),  # One way or both.
  ('throttle', '', 3),
  ('disk', SYNCER_NAME, 2),
  ('clock', '', 2),
  ('short_notice', '', 2),
)
SLICE_FAULTS = 'kill_slice', 'kill_slice', 'slice_away'
SHARDS = (1, 2, 4)  # S.
BATCHES = (8,), (8, 2), (2, 8, 3, 16, 1)
LARGE = 10.0  # Size of a fragment, as a multiple of the others.
THROTTLED = 20.0  # Factor on the time that bytes take.
PULL_MAX_S = 2.0  # In a healed run.
UPDATE_SHARE = 0.4  # Share of a round's time for its update.
NEWCOMERS_MAX = 2


@dataclasses.dataclass(frozen=True)
class Scenario:
  """All that a seed draws but the lengths of single steps.

  Attributes:
    faults: one whose target is broken already repairs it instead.
    shards: S, the processes of the syncer.
    last_shard: the shard repaired last: the others go on without it.
    sizes: sizes of the fragments, relative to the usual one; (): all equal.
    stall_share: share of the pulls that take far longer.
    partitions: of learners of several hosts, by id.
    finish: faults, in seconds after the run has begun to finish.
    full_updates: time of a full fragment, by that of an update.
    batches: rows of a step; learner m's n-th process has batches[m + n]. Of
      one with several slices they are those of a slice.
    slices: of each learner that has several, by id.
    slice_copy_steps: steps between two boundaries that these keep.
    reform_s: time in which they go on as another world.
  """

  seed: int
  config: ProtocolConfig
  timing: Timing
  loss: float
  checkpoint_rounds: int
  checkpoint_steps: int | None
  faults: tuple[Fault, ...]
  shards: int
  last_shard: int
  sizes: tuple[float, ...] = ()
  stall_share: float = 0.0
  partitions: Mapping[int, str] = dataclasses.field(default_factory=dict)
  finish: tuple[Fault, ...] = ()
  full_updates: float = 1.0
  batches: tuple[int, ...] = (8,)
  slices: Mapping[int, int] = dataclasses.field(default_factory=dict)
  slice_copy_steps: int = 1
  reform_s: float = 0.5

  def batch_of(self, learner: int, process: int) -> int:
    """Returns the rows of a step of a learner's process, from 0."""
    return self.batches[(learner + process) % len(self.batches)]

  @property
  def is_wide(self) -> bool:
    return self.seed >= WIDE_FROM

  def but(self, config: Mapping, timing: Mapping, **fields) -> 'Scenario':
    """Returns a scenario with other values in these fields."""
    return dataclasses.replace(
      self,
      config=dataclasses.replace(self.config, **config),
      timing=dataclasses.replace(self.timing, **timing),
      **fields,
    )

  @property
  def pull_s(self) -> float:
    """Time to pull the largest fragment over the slowest link, healed."""
    largest = max(self.sizes, default=1.0) * self.full_updates
    links = [*self.timing.links.values(), USUAL]
    return (
      self.timing.latency_s
      + max(x.up_s + x.down_s for x in links)
      + self.timing.transfer_s * largest * max(max(x.up, x.down) for x in links)
    )

  @property
  def heard_s(self) -> float:
    """The time after which what was said has been heard, and answered."""
    links = [*self.timing.links.values(), USUAL]
    message_s = self.timing.latency_s + max(
      max(x.up_s, x.down_s) for x in links
    )
    return 4 * message_s + 4 * self.timing.encode_s

  @property
  def longest_step_s(self) -> float:
    """Longest step of the slowest learner, ignoring `slow_share`."""
    return max(self.timing.step_s.values()) * (1 + 4 * self.timing.jitter)

  def end_bound_s(self, steps_left: int) -> float:
    """Returns the bound on a healed run's end: any step may await a round."""
    exchange_s = 2 * self.pull_s + 2 * self.timing.encode_s
    step_s = self.longest_step_s + exchange_s
    return 2 * self.bound_s + steps_left * step_s

  def wires(self) -> UnequalWires:
    """Returns the wires that the scenario begins with."""
    timing = self.timing
    return UnequalWires(
      timing.transfer_s,
      timing.latency_s,
      timing.links,
      self.sizes,
      self.stall_share,
      self.seed,
      self.full_updates,
    )

  @property
  def bound_s(self) -> float:
    """The bound on the time in which a healed run must make progress.

    Transfers begun over a throttled link end. A silent learner is detected,
    twice over (a session and its successor); fragments that no process has are
    given up; then a whole cycle of rounds, and one more for those in progress,
    at the pace of the slowest. Over unequal links a learner may wait for two
    states of peers: the first donor may have been killed meanwhile.
    """
    floor_s = timeouts.silence_floor_s(self.config.patience)
    steps = self.config.sync_every_steps + self.config.overlap_steps
    cycle_s = steps * self.longest_step_s
    bound_s = 4 * floor_s + 3 * cycle_s + 20 * self.pull_s
    if not self.is_wide:
      return bound_s
    wires = self.wires()
    return bound_s + wires.LONGEST_S + 2 * wires.longest_state_s()


def draw(seed: int) -> Scenario:
  """Returns the scenario of a seed."""
  rng = random.Random(seed)
  config = _draw_config(rng)
  ids = config.learners + NEWCOMERS_MAX
  step_s = rng.choice((0.3, 0.6))
  timing = Timing(
    {m: step_s * rng.choice((1.0, 1.0, 1.2, 2.0)) for m in range(ids)},
    jitter=rng.choice((0.0, 0.1, 0.3)),
    latency_s=rng.choice((0.001, 0.01, 0.1, 0.4)),
    transfer_s=rng.choice((0.001, 0.02, 0.2)),
    encode_s=rng.choice((0.001, 0.05)),
    reconnect_s=rng.choice((0.1, 0.5)),
    slow_share=rng.choice((0.0, 0.0, 0.05)),
    **_draw_late_pulls(seed),
  )
  loss = rng.choice((0.0, 0.0, 0.05, 0.3))
  checkpoints = rng.choice((1, 3, 10)), rng.choice((None, 3, 10))
  struck = _with_shards(seed, _draw_faults(rng, ids))
  # Drawn separately, like all that came later: the rest of a seed stays.
  batches = random.Random(f'batches of {seed}').choice(BATCHES)
  scenario = Scenario(
    seed, config, timing, loss, *checkpoints, *struck, batches=batches
  )
  if scenario.is_wide:
    scenario = _widened(scenario)
  if seed >= BURDENED_FROM:
    scenario = _burdened(scenario)
  return scenario if seed < SLICED_FROM else _sliced(scenario)


def _draw_late_pulls(seed: int) -> dict[str, float]:
  """Draws late pulls separately, which leaves the rest of a scenario alone."""
  rng = random.Random(f'late pulls of {seed}')
  return {
    'late_share': rng.choice((0.0, 0.0, 0.1, 0.3)),
    'late_s': rng.choice((0.3, 1.0, 4.0)),
  }


def _with_shards(
  seed: int, faults: tuple[Fault, ...]
) -> tuple[tuple[Fault, ...], int, int]:
  """Returns the faults including those of shards, S, and the shard repaired
  last.

  Drawn separately, so that a scenario of one process is unchanged.
  """
  rng = random.Random(f'shards of {seed}')
  shards = rng.choice(SHARDS)
  if shards == 1:
    return faults, shards, 0
  others = range(1, shards)
  until_s = faults[-1].at_s
  of_shards = [
    Fault(0, rng.uniform(0.0, until_s), 'kill', shard_name(rng.choice(others)))
    for _ in range(rng.randint(1, 8))
  ]
  return _in_order(*faults, *of_shards), shards, rng.choice(others)


def _in_order(*faults: Fault) -> tuple[Fault, ...]:
  return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _draw_config(rng: random.Random) -> ProtocolConfig:
  learners = rng.choice((1, 2, 2, 3, 3, 4))
  fragments = rng.choice((1, 2, 3))
  every = fragments * rng.choice((1, 2, 3))
  return ProtocolConfig(
    learners=learners,
    fragments=fragments,
    sync_every_steps=every,
    overlap_steps=rng.choice((0, rng.randrange(every), every - 1)),
    quorum=rng.choice((1, learners, rng.randint(1, learners))),
    grace_safety=0.5,
    grace_cap_steps=rng.choice((0.0, 1.0)),
    admission=rng.choice(tuple(ADMISSIONS)),
    max_staleness_versions=rng.choice((0, 1, 3)),
    weighting='tokens',
    patience=0.3,
    total_steps=rng.choice((12, 30, 10_000, 10_000, 10_000)),
    blend=rng.choice(tuple(BLENDS)),
  )


def _draw_faults(rng: random.Random, ids: int) -> tuple[Fault, ...]:
  # Frequent faults differ between scenarios, so that some see one twice.
  weights = [w * rng.choice((0.2, 1.0, 4.0)) for *_, w in FAULTS]
  calm_s = rng.choice((0.3, 1.0, 2.0))
  faults, at_s = [], 0.0
  for _ in range(rng.randint(4, 24)):
    at_s += rng.expovariate(1 / calm_s)
    kind, target, _ = rng.choices(FAULTS, weights)[0]
    learner = learner_name(rng.randrange(ids - NEWCOMERS_MAX))
    notice_s = rng.choice((0.1, 2.0, 6.0))
    faults.append(Fault(0, at_s, kind, target or learner, notice_s=notice_s))
  return tuple(faults)


# The wide space --------------------------------------------------------------


def _widened(scenario: Scenario) -> Scenario:
  """Adds some of what a narrow scenario can't have, drawn separately."""
  rng = random.Random(f'wide {scenario.seed}')
  config = _widened_config(rng, scenario.config)
  ids = config.learners + NEWCOMERS_MAX
  finish = ()
  if rng.random() < 0.2:
    steps = rng.choice((6, 12))
    config = dataclasses.replace(config, total_steps=steps)
    finish = _draw_finish(rng, scenario.shards)
  large = rng.random() < 0.3
  sizes = [1.0] * config.fragments
  if large:
    sizes[rng.randrange(config.fragments)] = LARGE
  of_several_hosts = rng.choice((0.0, 0.0, 0.5, 1.0))
  partitions = {
    m: rng.choice(('halves', 'halves', 'thirds'))
    for m in range(ids)
    if rng.random() < of_several_hosts
  }
  return dataclasses.replace(
    scenario,
    config=config,
    sizes=tuple(sizes),
    stall_share=rng.choice((0.0, 0.0, 0.02, 0.1)),
    partitions=partitions,
    finish=finish,
    timing=_widened_timing(rng, scenario.timing, config, max(sizes)),
    faults=_widened_faults(rng, scenario.faults, config.learners),
  )


def _more_steps(
  rng: random.Random, timing: Timing, ids: int
) -> dict[int, float]:
  """Returns the lengths of steps; those of new ids are drawn."""
  usual_s = min(timing.step_s.values())
  return {
    m: timing.step_s.get(m, usual_s * rng.choice((1.0, 1.0, 1.2, 2.0)))
    for m in range(ids)
  }


def _widened_config(
  rng: random.Random, config: ProtocolConfig
) -> ProtocolConfig:
  """Draws sometimes many learners, rarely very many; also more fragments."""
  drawn = rng.random()
  if drawn < 0.07:
    many = rng.randint(5, 8) if drawn < 0.06 else rng.randint(9, 32)
    quorum = rng.choice((1, many // 2, rng.randint(1, many), many))
    config = dataclasses.replace(config, learners=many, quorum=quorum)
  if rng.random() < 0.1:
    fragments = rng.choice((4, 6))
    every = fragments * rng.choice((1, 2))
    overlap = rng.choice((0, rng.randrange(every), every - 1))
    config = dataclasses.replace(
      config, fragments=fragments, sync_every_steps=every, overlap_steps=overlap
    )
  return config


def _widened_timing(
  rng: random.Random, timing: Timing, config: ProtocolConfig, largest: float
) -> Timing:
  """Draws links that differ by learner and direction, and can bear the run."""
  ids = range(config.learners + NEWCOMERS_MAX)
  step_s = _more_steps(rng, timing, len(ids))
  links = {}
  if rng.random() < 0.5:
    links = {m: _draw_link(rng) for m in ids if rng.random() < 0.5}
  up = max([x.up for x in links.values()], default=1.0)
  down = max([x.down for x in links.values()], default=1.0)
  round_s = config.spacing_steps * min(step_s.values())
  transfer_s = min(
    timing.transfer_s,
    PULL_MAX_S / (largest * up),
    # A learner that fetches updates too slowly would fall behind for ever.
    UPDATE_SHARE * round_s / (largest * down),
  )
  return dataclasses.replace(
    timing, step_s=step_s, links=links, transfer_s=transfer_s
  )


def _draw_link(rng: random.Random) -> LinkDeviation:
  return LinkDeviation(
    up_s=rng.choice((0.0, 0.05, 0.4)),
    down_s=rng.choice((0.0, 0.05, 0.4)),
    up=rng.choice((1.0, 3.0, 10.0)),
    down=rng.choice((1.0, 3.0, 10.0)),
  )


def _widened_faults(
  rng: random.Random, faults: tuple[Fault, ...], learners: int
) -> tuple[Fault, ...]:
  """Spreads the faults over all learners, and adds some of the wide ones."""
  dealt = []
  for fault in faults:
    learner = learner_name(rng.randrange(learners))
    own = fault.learner is not None
    dealt.append(dataclasses.replace(fault, target=learner) if own else fault)
  weights = [w * rng.choice((0.2, 1.0, 4.0)) for *_, w in WIDE_FAULTS]
  until_s = faults[-1].at_s
  for _ in range(rng.randint(0, 8)):
    at_s = rng.uniform(0.0, until_s)
    kind, target, _ = rng.choices(WIDE_FAULTS, weights)[0]
    learner = learner_name(rng.randrange(learners))
    notice_s = rng.choice((0.0, 0.1, 0.5, 2.0))
    way = rng.choice((*WAYS, ''))
    if kind == 'cut' and way:
      kind = 'cut_one_way'
    jump_s = rng.choice((-3600.0, -3600.0, -2.0, 3600.0))
    way = way if kind == 'cut_one_way' else ''
    hit = 0, at_s, kind, target or learner, 0.0, way, notice_s, jump_s
    dealt.append(Fault(*hit))
  return _in_order(*dealt)


def _draw_finish(rng: random.Random, shards: int) -> tuple[Fault, ...]:
  """Draws restarts while the run finishes; rarely without the disk."""
  after_s, faults = 0.0, []
  for _ in range(rng.randint(1, 3)):
    after_s += rng.choice((0.0, 0.05, 0.5, 3.0))
    if shards > 1 and rng.random() < 0.3:
      shard = rng.randrange(1, shards)
      faults.append(Fault(0, after_s, 'kill', shard_name(shard)))
      continue
    faults.append(Fault(0, after_s, 'kill', SYNCER_NAME))  # It dies,
    if rng.random() < 0.2:
      faults.append(Fault(0, after_s, 'lose_disk', SYNCER_NAME))
    after_s += rng.choice((0.05, 0.5, 2.0))
    faults.append(Fault(0, after_s, 'kill', SYNCER_NAME))  # and is back.
  return tuple(faults)


# The sliced space ------------------------------------------------------------


def _sliced(scenario: Scenario) -> Scenario:
  """Draws learners of several slices, and losses of these; drawn separately."""
  rng = random.Random(f'slices of {scenario.seed}')
  if rng.random() < 0.5:
    return scenario
  ids = range(scenario.config.learners)
  slices = {m: rng.choice((2, 3, 4)) for m in ids if rng.random() < 0.7}
  if not slices:
    return scenario
  until_s = scenario.faults[-1].at_s
  lost = [
    Fault(0, rng.uniform(0.0, until_s), kind, learner_name(m))
    for m, count in slices.items()
    for kind in rng.choices(SLICE_FAULTS, k=rng.randint(1, 2 * count))
  ]
  return dataclasses.replace(
    scenario,
    slices=slices,
    slice_copy_steps=rng.choice((1, 1, 3)),
    reform_s=rng.choice((0.0, 0.2, 2.0)),
    faults=_in_order(*scenario.faults, *lost),
  )


# The burdened space ----------------------------------------------------------


def _burdened(scenario: Scenario) -> Scenario:
  """Adds to a share of the seeds what is rare otherwise."""
  rng = random.Random(f'burdened {scenario.seed}')
  drawn = rng.random()
  for share, burden in BURDENS:
    if drawn < share:
      return burden(rng, scenario)
    drawn -= share
  return scenario


def _with_a_slow_link(rng: random.Random, scenario: Scenario) -> Scenario:
  """Draws a learner to which updates take longer than rounds.

  Rounds go on without it, and its work is admitted if it is a little stale.
  Faults begin once the link has been too slow for a while, and are fewer: a
  learner that restarts pulls whole fragments.
  """
  config, timing = scenario.config, scenario.timing
  learners = max(2, config.learners)
  every = max(2, config.sync_every_steps)
  quorum = rng.randint(1, learners - 1)
  changes = {
    'learners': learners,
    'quorum': quorum,
    'sync_every_steps': every,
    'overlap_steps': config.overlap_steps or every - 1,
    'max_staleness_versions': rng.choice((1, 3, 6)),
    'total_steps': 10_000,
  }
  slow = rng.randrange(learners)
  others_s = sorted(timing.step_s[m] for m in range(learners) if m != slow)
  # Rounds come at the pace of the learner that completes the quorum.
  spacing_steps = dataclasses.replace(config, **changes).spacing_steps
  round_s = spacing_steps * others_s[quorum - 1]
  usual_s = timing.transfer_s * sum(scenario.sizes) / len(scenario.sizes)
  link = dataclasses.replace(
    timing.links.get(slow, USUAL),
    down=rng.uniform(*TOO_SLOW) * round_s / usual_s,
  )
  calm_s = CALM_ROUNDS * round_s
  return scenario.but(
    changes,
    {'links': {**timing.links, slow: link}},
    faults=tuple(
      dataclasses.replace(fault, at_s=calm_s + 2 * fault.at_s)
      for fault in scenario.faults[:: rng.choice((1, 2, 4))]
    ),
    finish=(),
    full_updates=rng.choice((1.0, 4.0, 7.5)),
  )


def _with_many_learners(rng: random.Random, scenario: Scenario) -> Scenario:
  """Draws many learners, and a restart that loses the last closes' bytes."""
  learners = max(rng.randint(16, 24), scenario.config.learners)
  step_s = _more_steps(rng, scenario.timing, learners + NEWCOMERS_MAX)
  quorum = rng.choice((1, learners // 2, rng.randint(1, learners), learners))
  until_s = scenario.faults[-1].at_s
  dies_s = rng.uniform(0.5 * until_s, until_s)
  back_s = dies_s + rng.choice((0.2, 1.0, 4.0))
  restart = [Fault(0, t, 'kill', SYNCER_NAME) for t in (dies_s, back_s)]
  return scenario.but(
    {'learners': learners, 'quorum': quorum},
    {'step_s': step_s},
    checkpoint_rounds=10,
    faults=_in_order(*scenario.faults, *restart),
  )


def _with_late_donations(rng: random.Random, scenario: Scenario) -> Scenario:
  """Draws newcomers whose donors' copies are older than what a shard regains.

  A shard dies as its newest version is on the way to the learners, and is back
  before a donor has offered its copy.
  """
  fragments = rng.choice((1, 2))
  learners = max(rng.randint(3, 6), scenario.config.learners)
  step_s, fast = min(scenario.timing.step_s.values()), learners - 1
  faults, at_s = [*scenario.faults[:: rng.choice((1, 4))]], 0.0
  for _ in range(rng.randint(8, 16)):
    at_s += rng.uniform(1.0, 3.0)
    learner = learner_name(rng.randrange(fast))
    dies_s = at_s + rng.uniform(step_s, 6 * step_s)
    back_s = dies_s + rng.choice((0.02, 0.1))
    faults += [
      Fault(0, at_s, 'kill', learner),
      Fault(0, at_s + 0.05, 'kill', learner),
      Fault(0, dies_s, 'kill', shard_name(1)),
      Fault(0, back_s, 'kill', shard_name(1)),
    ]
  config = {
    'learners': learners,
    'fragments': fragments,
    'sync_every_steps': 2,
    'overlap_steps': 1,
    'quorum': 1,
    'total_steps': 10_000,
  }
  steps_s = dict.fromkeys(range(learners + NEWCOMERS_MAX), 4.0 * step_s)
  steps_s[fast] = step_s
  return scenario.but(
    config,
    {'step_s': steps_s, 'latency_s': 0.01, 'transfer_s': step_s, 'links': {}},
    faults=_in_order(*faults),
    checkpoint_rounds=10,
    shards=max(2, scenario.shards),
    last_shard=1,
    sizes=(1.0,) * fragments,
    finish=(),
  )


# Shares of the seeds, and what they have.
BURDENS = (
  (0.06, _with_a_slow_link),
  (0.06, _with_many_learners),
  (0.03, _with_late_donations),
)
