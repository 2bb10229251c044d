# SPDX-License-Identifier: Apache-2.0
"""One soak: which processes are killed when, what is checked, the table."""

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from diloco.config.run_config import RunConfig
from diloco.metrics import token_ledger
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from launch.chaos import checks as run_checks
from launch.chaos.checks import Check
from launch.chaos.stage import LiveRun, Overdue, participants
from launch.local import Interrupted, RunFailed
from launch.program import SYNCER
from launch.supervisor import ProcessEvent
from tests.chaos.resources import (
  DESCRIPTORS_MAX,
  RSS_BYTES_MAX,
  THREADS_MAX,
  Growth,
  ResourceWatch,
)

PAIR_SHARE = 0.2  # Of the strikes, two processes at once.
START_UP_SHARE = 0.3  # While the last ones killed start again.
START_UP_S = 5.0  # About what a process takes to be ready.
CALM_S = 1.5
MERGED_S = 180.0  # Until every learner is merged, at first and after a strike.


@dataclasses.dataclass(frozen=True)
class Strike:
  """SIGKILL for one or two processes at one moment."""

  victims: tuple[str, ...]
  in_start_up: bool  # `delay_s` after the last victims were started again;
  # or after every learner has been merged since the last strike.
  delay_s: float


def plan(kills: int, seed: int, roles: Sequence[str]) -> list[Strike]:
  """Plans `kills` kills in all.

  The run has as many quarters as there are roles; in each, one role is spared,
  so that the memory it accumulates over all those deaths can be measured.
  """
  rng = random.Random(seed)
  strikes, done = [], 0
  while done < kills:
    spared = roles[done * len(roles) // kills]
    mortal = [role for role in roles if role != spared]
    wants_pair = rng.random() < PAIR_SHARE
    many = 2 if wants_pair and kills - done >= 2 else 1
    in_start_up = rng.random() < START_UP_SHARE and done > 0
    strikes.append(
      Strike(
        tuple(sorted(rng.sample(mortal, min(many, len(mortal))))),
        in_start_up,
        rng.uniform(0.0, START_UP_S if in_start_up else CALM_S),
      )
    )
    done += len(strikes[-1].victims)
  return strikes


class Soak:
  """One soak test, from its first process to its checks."""

  def __init__(
    self,
    config: RunConfig,
    arguments: Sequence[str],
    workdir: Workdir,
    strikes: Sequence[Strike],
    say: Callable[[str], None],
    received: list[int],
  ):
    """Starts nothing yet.

    Args:
      config: with `log_every_steps` = 1, or the tokens can't balance.
      arguments: the flags that give a process this configuration.
      workdir: occupied, empty.
      strikes: in their order.
      say: takes a line for the user.
      received: signals that ask to stop.
    """
    self._config = config
    self._strikes = strikes
    self._say = say
    self._received = received
    roles = [SYNCER, *map(learner_name, range(config.protocol.learners))]
    self._resources = ResourceWatch(roles, hub=SYNCER)
    self._merges = self._read_lines = 0
    self._kills = 0
    self._ended: str | None = None  # Why before its time.
    self.run = LiveRun(
      config, arguments, workdir, announce=self._on_event, on_poll=self._look
    )

  def strike_all(self, calm_s: float) -> None:
    """Kills by the plan, then `calm_s` without; stops everything."""
    began_s = time.monotonic()
    try:
      with self.run as run:
        struck_s = 0.0
        for strike in self._strikes:
          self._wait_for(strike, struck_s)
          struck_s = time.time()
          for victim in strike.victims:
            run.supervisor.kill(victim, 'by the plan of the soak')
          self._tell(strike, time.monotonic() - began_s)
        self._until_merged(struck_s)
        run.spend(calm_s)
    except (Overdue, RunFailed) as error:
      self._ended = str(error)
      self._say(f'ended before its time: {error}')
    self.run.read()

  def checks(self) -> list[Check]:
    """Everything that must hold, with what was found."""
    run, protocol = self.run, self._config.protocol
    growths = self._resources.growths()
    ledger = token_ledger.rows_of(
      run.workdir, protocol.fragments, protocol.blend
    )
    return [
      Check(
        'rounds go on closing',
        [self._ended] if self._ended else [],
        f'{self._merges} closed',
      ),
      *run_checks.common(
        run.tape,
        {m: read_jsonl(run.workdir.learner_tape(m)) for m in run.learners},
        ledger,
        run.events,
        is_over=run.workdir.summary.exists(),
      ),
      _flat('memory', growths, 'rss_bytes', RSS_BYTES_MAX, 1e6, 'MB'),
      _flat('descriptors', growths, 'descriptors', DESCRIPTORS_MAX, 1, ''),
      _flat('threads', growths, 'threads', THREADS_MAX, 1, ''),
      Check('all processes are gone', self._resources.left()),
    ]

  def growths(self) -> list[Growth]:
    return self._resources.growths()

  def _wait_for(self, strike: Strike, struck_s: float) -> None:
    if not strike.in_start_up:
      self._until_merged(struck_s)
    supervisor = self.run.supervisor
    self.run.until(
      lambda: all(state.pid is not None for state in supervisor.states()),
      MERGED_S,
      'every process runs',
    )
    self.run.spend(strike.delay_s)
    self.run.until(
      lambda: all(supervisor.is_running(victim) for victim in strike.victims),
      MERGED_S,
      f'{", ".join(strike.victims)} runs, to be killed',
    )

  def _until_merged(self, since_s: float) -> None:
    self.run.until(
      lambda: self.run.all_merge(since_s),
      MERGED_S,
      'every learner is merged since the last kill',
    )

  def _look(self) -> None:
    """Processes new event log lines and samples, at every poll."""
    if self._received:
      raise Interrupted(self._received[0])
    tape = self.run.tape
    for line in tape[self._read_lines :]:
      if line['kind'] == 'Publish':
        self._merges += 1
        for name in (SYNCER, *map(learner_name, participants(line))):
          self._resources.works(name)
    self._read_lines = len(tape)
    self._resources.sample()

  def _on_event(self, event: ProcessEvent) -> None:
    match event.event:
      case 'started':
        self._resources.follow(event.process, event.pid)
      case 'killed' | 'exited' | 'stopped':
        self._resources.dies(event.process)

  def _tell(self, strike: Strike, at_s: float) -> None:
    self._kills += len(strike.victims)
    when = 'in a start-up' if strike.in_start_up else 'in calm'
    planned = sum(len(each.victims) for each in self._strikes)
    self._say(
      f'{at_s:6.1f} s  kill {self._kills}/{planned}  '
      f'{" and ".join(strike.victims)}, {when}; {self._merges} rounds closed'
    )


def _flat(
  what: str,
  growths: Sequence[Growth],
  field: str,
  most: float,
  unit: float,
  word: str,
) -> Check:
  """Checks that no process's `field` grows by more than `most` per minute."""
  found = {
    f'{g.name} ({g.pid})': value
    for g in growths
    if (value := getattr(g, field)) is not None
  }
  findings = [
    f'{name}: {value / unit:+.1f} {word} per minute, at most '
    f'{most / unit:.0f} is flat'
    for name, value in found.items()
    if value > most
  ]
  note = 'no process lived long enough to tell'
  if found:
    worst = max(found, key=lambda name: found[name])
    note = (
      f'{len(found)} processes; most {found[worst] / unit:+.1f} {word} per '
      f'minute, {worst}'
    )
  return Check(f'{what} is flat', findings, ' '.join(note.split()))
