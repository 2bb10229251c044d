# SPDX-License-Identifier: Apache-2.0
"""Studies take place here: on real processes, or in the simulator.

Both are told the same, and read the same way, so that each measured figure has
its prediction.
"""

import collections
import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from diloco.fleets.speeds import Speeds
from diloco.fleets.tally import Tally
from diloco.metrics import token_tapes
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.token_ledger import TokenCounts
from diloco.metrics.workdir import learner_name
from diloco.simulator.cluster import Cluster, ClusterOptions
from diloco.simulator.network import SYNCER, Links, Network
from diloco.simulator.observer import TokenObserver
from diloco.simulator.timing import Timing
from tests.netbench.links import Loopback, SiteLinks
from tests.netbench.net_systems import (
  PAYLOAD,
  TOKENS,
  NetSystem,
  Setting,
  network_of,
)
from tests.netbench.process_run import ProcessRun, SystemFailed

START_S = 180.0  # For a process to compile and to be let in.
NOTICE_S = 25.0  # The learner's own default.
PATIENCE = 4.0  # Steps may take so many times their floor, and
GRACE_S = 60.0  # so much.
JITTER = 0.02  # Of simulated steps, as a share: no two processes are in step.
SEED = 0
SIMULATED_S = 86_400.0  # After so long a phase is given up.
FAR = 10**6  # The far site as one process of the simulated network.


@dataclasses.dataclass(frozen=True)
class LearnerTotals:
  """The totals of a learner up to a time, or between two."""

  steps: int = 0
  merges: int = 0  # Rounds that included it.
  age_steps: float = 0.0  # Σ of the ages of what was merged.
  # Each token counts once for every fragment.
  trained: int = 0
  merged: int = 0
  gone: int = 0  # Overwritten, or lost.

  def plus(self, other: 'LearnerTotals', sign: int = 1) -> 'LearnerTotals':
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
    return LearnerTotals(*(a + sign * b for a, b in pairs))


@dataclasses.dataclass(frozen=True)
class Reading:
  """The state of a run at a time, in totals."""

  time_s: float
  rounds: int
  learners: Mapping[int, LearnerTotals]


class StudyStage(Protocol):
  """A run that goes on; learners 0 … M − 1 have started, and step."""

  def shape(self, mbits: float) -> None:
    """Limits the link between the sites, each way."""

  def join(self, learners: Sequence[int]) -> None:
    """Starts learners; returns when each has made a step."""

  def leave(self, learners: Sequence[int]) -> None:
    """Gives learners notice; does not wait."""

  def pass_steps(self, steps: int) -> None:
    """Waits until learner 0 has made so many more steps."""

  def reading(self) -> Reading:
    """Returns what was done so far."""


class ProcessStage(ProcessRun):
  """Real processes; a `with` block ends them."""

  def __init__(
    self,
    system: NetSystem,
    setting: Setting,
    links: Loopback | SiteLinks,
    received: list[int],
  ):
    super().__init__(setting.members, received)
    self._setting = setting
    self._links = links
    self._config = system.config(setting)
    roles, environment = system.roles(setting, links, self.workdir)
    later = setting.members[setting.learners :]
    self._later = {role.name: role for role in roles if role.name in later}
    first = [role for role in roles if role.name not in later]
    self._supervise(first, environment)

  def start(self) -> None:
    """Starts all that are there from the beginning."""
    if isinstance(self._links, SiteLinks):
      self._links.shape(None)
    self._until_all(self._setting.members[: self._setting.learners])

  def shape(self, mbits: float) -> None:
    assert isinstance(self._links, SiteLinks), 'there is no link'
    self._links.shape(mbits)

  def join(self, learners: Sequence[int]) -> None:
    names = [learner_name(m) for m in learners]
    for name in names:
      self._supervisor.add(self._later[name])
    self._until_all(names)

  def leave(self, learners: Sequence[int]) -> None:
    for m in learners:
      self._supervisor.dismiss(learner_name(m), 'the visit is over')

  def pass_steps(self, steps: int) -> None:
    first = self._setting.members[0]
    enough = self._made()[first] + steps
    limit_s = GRACE_S + PATIENCE * steps * self._setting.step_s
    self._until(lambda: self._made()[first] >= enough, limit_s)

  def reading(self) -> Reading:
    protocol = self._config.protocol
    closes = [
      x for x in read_jsonl(self.workdir.tape) if x['kind'] == 'Publish'
    ]
    merges, ages = collections.Counter(), collections.Counter()
    for share in (share for close in closes for share in close['shares']):
      merges[share['learner']] += 1
      ages[share['learner']] += share['age_steps']
    rows = token_tapes.rows_of(
      self.workdir, protocol.fragments, TOKENS, protocol.blend
    )
    made = list(self._made().values())
    return Reading(
      time.monotonic(),
      len(closes),
      {
        m: _totals(made[m], merges[m], ages[m], rows, m)
        for m in range(len(made))
      },
    )

  def _until_all(self, names: Sequence[str]) -> None:
    self._until(lambda: all(self._made()[n] > 0 for n in names), START_S)


class MachineStage:
  """The protocol's own machines under the simulated clock.

  Args:
    far: learners beyond the link, which the syncer is not.
  """

  def __init__(
    self, system: NetSystem, setting: Setting, far: Sequence[int] = ()
  ):
    self._config = system.config(setting)
    self._params = setting.params
    self._far = frozenset(far)
    self._seen = _Seen(self._config.protocol.fragments)
    rng = random.Random(SEED)
    self._cluster = Cluster(
      self._config.protocol,
      Timing(dict(enumerate(setting.steps_s))),
      SEED,
      observer=self._seen,
      options=ClusterOptions(
        speeds={
          m: Speeds(step_s, JITTER, random.Random(rng.random())).next_s
          for m, step_s in enumerate(setting.steps_s)
        },
        tokens_per_step=TOKENS,
      ),
    )
    self._learners = len(setting.steps_s)
    self.join(range(setting.learners))

  def shape(self, mbits: float) -> None:
    network = network_of(self._config, self._params, 1e6 * PAYLOAD * mbits)
    self._cluster.wires = _SiteWires(network, self._far)

  def join(self, learners: Iterable[int]) -> None:
    learners = list(learners)
    for m in learners:
      self._cluster.start(m)
    self._until(lambda: all(self._seen.count(m).steps for m in learners))

  def leave(self, learners: Sequence[int]) -> None:
    for m in learners:
      self._cluster.preempt(m, NOTICE_S)

  def pass_steps(self, steps: int) -> None:
    enough = self._seen.count(0).steps + steps
    self._until(lambda: self._seen.count(0).steps >= enough)

  def reading(self) -> Reading:
    rows = self._seen.ledger.rows()
    counts = {m: self._seen.count(m) for m in range(self._learners)}
    return Reading(
      self._cluster.sim.now,
      self._seen.rounds,
      {
        m: _totals(each.steps, each.merged, each.ages.total_steps, rows, m)
        for m, each in counts.items()
      },
    )

  def _until(self, holds: Callable[[], bool]) -> None:
    """Simulates until `holds()`; raises if it does not come to that."""
    sim = self._cluster.sim
    sim.run(sim.now + SIMULATED_S, stop=holds)
    if not holds():
      raise SystemFailed(f'simulated: nothing came of it in {SIMULATED_S:g} s')


class _Seen(Tally):
  """Counts what happens in a cluster, tokens included."""

  def __init__(self, fragments: int):
    super().__init__()
    self.ledger = TokenObserver(fragments)

  def at_syncer(self, syncer, event, effects):
    super().at_syncer(syncer, event, effects)
    self.ledger.at_syncer(syncer, event, effects)

  def at_learner(self, process, event, effects):
    super().at_learner(process, event, effects)
    self.ledger.at_learner(process, event, effects)


class _SiteWires(Links):
  """Wires of two sites: all that is far shares one link to the syncer's."""

  def __init__(self, network: Network, far: frozenset[int]):
    super().__init__(network, window_s=1.0)
    self._far_ids = far

  def arrival_s(self, now_s, source, target, cargo, fragment):
    ends = [FAR if x in self._far_ids else SYNCER for x in (source, target)]
    if ends[0] == ends[1]:
      return now_s
    return super().arrival_s(now_s, *ends, cargo, fragment)


def _totals(
  steps: int,
  merges: int,
  age_steps: float,
  rows: Mapping[tuple[int, int], TokenCounts],
  learner: int,
) -> LearnerTotals:
  own = [row for (m, _), row in rows.items() if m == learner]
  return LearnerTotals(
    steps,
    merges,
    age_steps,
    sum(row.trained for row in own),
    sum(row.merged for row in own),
    sum(row.overwritten + sum(n for _, n in row.lost) for row in own),
  )
