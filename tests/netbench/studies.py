# SPDX-License-Identifier: Apache-2.0
"""Studies of the method on real processes: two sites, unequal, visitors.

Each is some runs of some phases. A phase begins with what happens to the run,
goes on until that has settled, and then is read over a window; the simulator
goes through the same phases.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from diloco.config.run_config import RunConfig
from tests.netbench.links import Loopback, SiteLinks
from tests.netbench.net_systems import SYSTEMS, NetSystem, Setting
from tests.netbench.stages import (
  LearnerTotals,
  MachineStage,
  ProcessStage,
  Reading,
  StudyStage,
)

SETTLE_PERIODS = 2  # Of H steps, before a window.
SLOWER = (2.0, 5.0)  # The slow learners' steps.
GRACE_CAP_STEPS = 2.0
# As in `diloco.config.simulation`: K (0: M), the longest grace window in steps,
# and what is admitted.
MERGING = {
  'K=M': (0, 0.0, 'fresh'),
  'K=1': (1, 0.0, 'fresh'),
  'K=1 grace': (1, GRACE_CAP_STEPS, 'fresh'),
  'K=1 latest': (1, 0.0, 'latest'),
  'K=1 grace latest': (1, GRACE_CAP_STEPS, 'latest'),
}
WHOLE = 'whole visit'


@dataclasses.dataclass(frozen=True)
class Phase:
  """A part of a run: its name, and what happens at its beginning."""

  name: str
  begin: Callable[[StudyStage], None] = lambda stage: None


@dataclasses.dataclass(frozen=True)
class StudiedRun:
  """One run of a study.

  Attributes:
    groups: ids of learners that share a row, by its name.
    far: learners at the other site.
    visitors: those whose whole visit gets a row.
  """

  name: str
  system: NetSystem
  setting: Setting
  phases: tuple[Phase, ...]
  groups: Mapping[str, tuple[int, ...]]
  far: tuple[int, ...] = ()
  visitors: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class GroupFigures:
  """The figures of a group of learners in a window; shares are of 1.

  Attributes:
    pace: rounds closed, of those that the fastest learner's steps made due.
    steps: made, of those that their floors allow; None: of a whole visit.
    participation: rounds that included a learner, on average; None likewise.
    age_steps: mean age of what was merged; None: nothing was.
    trained: tokens.
    merged: share of these that was merged.
    gone: share of these that was overwritten or lost.
  """

  pace: float | None
  steps: float | None
  participation: float | None
  age_steps: float | None
  trained: float
  merged: float
  gone: float


@dataclasses.dataclass(frozen=True)
class StudyCell:
  """One group in one phase of one run."""

  run: str
  phase: str
  group: str
  learners: int
  measured: GroupFigures
  predicted: GroupFigures


def sites(
  setting: Setting, systems: Sequence[str], rates: Sequence[float]
) -> Iterator[StudiedRun]:
  """Yields two sites with M learners each, the syncer at the first."""
  each = setting.learners
  for name in systems:
    yield StudiedRun(
      name,
      SYSTEMS[name],
      dataclasses.replace(setting, learners=2 * each),
      tuple(
        Phase(f'{rate:g} Mbit/s', lambda stage, rate=rate: stage.shape(rate))
        for rate in rates
      ),
      {'near': tuple(range(each)), 'far': tuple(range(each, 2 * each))},
      far=tuple(range(each, 2 * each)),
    )


def unequal(
  setting: Setting, systems: Sequence[str], rates: Sequence[float]
) -> Iterator[StudiedRun]:
  """Yields M learners and two slow ones, under each way to merge."""
  del rates
  fast = setting.learners
  slowness = (1.0,) * fast + SLOWER
  groups = {'fast': tuple(range(fast))}
  groups |= {f'{x:g} times': (fast + i,) for i, x in enumerate(SLOWER)}
  for name, merging in itertools.product(systems, MERGING):
    quorum, grace_cap_steps, admission = MERGING[merging]
    keys = {
      'protocol.quorum': quorum,
      'protocol.grace_cap_steps': grace_cap_steps,
      'protocol.admission': admission,
    }
    system = SYSTEMS[name]
    yield StudiedRun(
      f'{name} {merging}',
      dataclasses.replace(system, settings={**(system.settings or {}), **keys}),
      dataclasses.replace(setting, learners=len(slowness), slowness=slowness),
      (Phase('all'),),
      groups,
    )


def visitors(
  setting: Setting, systems: Sequence[str], rates: Sequence[float]
) -> Iterator[StudiedRun]:
  """Yields M learners that stay, and M that come and go."""
  del rates
  stay = setting.learners
  come = tuple(range(stay, 2 * stay))
  for name in systems:
    yield StudiedRun(
      name,
      SYSTEMS[name],
      dataclasses.replace(setting, slowness=(1.0,) * (2 * stay)),
      (
        Phase('before'),
        Phase('visit', lambda stage: stage.join(come)),
        Phase('after', lambda stage: stage.leave(come)),
      ),
      {'stay': tuple(range(stay)), 'visit': come},
      visitors=come,
    )


@dataclasses.dataclass(frozen=True)
class NetStudy:
  """A study of the command.

  Attributes:
    title: of its table.
    runs: yields the runs for a setting, systems and rates.
    systems: of `SYSTEMS`, where none are asked for; none may wait.
    mbits: rates of the link between sites, likewise; empty: there is none.
  """

  title: str
  runs: Callable[
    [Setting, Sequence[str], Sequence[float]], Iterator[StudiedRun]
  ]
  systems: tuple[str, ...] = ('int4',)
  mbits: tuple[float, ...] = ()


STUDIES = {
  'sites': NetStudy(
    'Two sites, and one slow link between them',
    sites,
    systems=('int4', 'bf16'),
    mbits=(0.3, 1.0, 3.0),
  ),
  'unequal': NetStudy('Learners that are 2 and 5 times slower', unequal),
  'visitors': NetStudy('Learners that come and go', visitors),
}


def measure(
  study: StudiedRun,
  links: Loopback | SiteLinks,
  seconds: float,
  received: list[int],
) -> list[StudyCell]:
  """Runs it twice, on processes and in the simulator.

  Args:
    seconds: length of a window, at the floor of a step.
  """
  steps = math.ceil(seconds / study.setting.step_s)
  predicted = follow(
    MachineStage(study.system, study.setting, study.far), study, steps
  )
  with ProcessStage(study.system, study.setting, links, received) as stage:
    stage.start()
    measured = follow(stage, study, steps)
  return [
    StudyCell(
      study.name, phase, group, len(study.groups[group]), found,
      predicted[phase, group],
    )
    for (phase, group), found in measured.items()
  ]  # fmt: skip


def follow(
  stage: StudyStage, study: StudiedRun, steps: int
) -> dict[tuple[str, str], GroupFigures]:
  """Returns the figures by phase and group."""
  config = study.system.config(study.setting)
  figures = functools.partial(_figures, study.setting, config)
  settled = SETTLE_PERIODS * config.protocol.sync_every_steps
  found = {}
  for phase in study.phases:
    phase.begin(stage)
    stage.pass_steps(settled)
    before = stage.reading()
    stage.pass_steps(steps)
    after = stage.reading()
    for group, ids in study.groups.items():
      # Those that are not there have no figures.
      if any(after.learners[m].steps > before.learners[m].steps for m in ids):
        found[phase.name, group] = figures(before, after, ids)
  if study.visitors:
    nothing = Reading(0.0, 0, {m: LearnerTotals() for m in after.learners})
    whole = figures(nothing, after, study.visitors)
    # They have left: what was not merged never will be.
    found[WHOLE, 'visit'] = dataclasses.replace(
      whole,
      pace=None,
      steps=None,
      participation=None,
      gone=1 - whole.merged,
    )
  return found


def _figures(
  setting: Setting,
  config: RunConfig,
  before: Reading,
  after: Reading,
  ids: Sequence[int],
) -> GroupFigures:
  done = {
    m: after.learners[m].plus(before.learners[m], -1) for m in after.learners
  }
  rounds, seconds = after.rounds - before.rounds, after.time_s - before.time_s
  whole = functools.reduce(LearnerTotals.plus, (done[m] for m in ids))
  floor_s = sum(done[m].steps * setting.steps_s[m] for m in ids)
  most = max(each.steps for each in done.values())
  return GroupFigures(
    pace=rounds * config.protocol.spacing_steps / most,
    steps=floor_s / (len(ids) * seconds),
    participation=whole.merges / (len(ids) * rounds) if rounds else 0.0,
    age_steps=whole.age_steps / whole.merges if whole.merges else None,
    trained=whole.trained / config.protocol.fragments,
    merged=whole.merged / max(whole.trained, 1),
    gone=whole.gone / max(whole.trained, 1),
  )
