# SPDX-License-Identifier: Apache-2.0
"""One soak: which processes are killed when, what is checked, the table."""

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from diloco.config.run_config import RunConfig
from diloco.metrics import names, token_ledger
from diloco.metrics.goodput import work_of_tape
from diloco.metrics.workdir import Workdir, learner_name
from launch.chaos import checks as run_checks
from launch.chaos.checks import Check
from launch.chaos.live_run import (
  LiveRun,
  Overdue,
  RunFailed,
  WrittenStep,
  participants,
)
from launch.program import SYNCER
from launch.session import Interrupted
from launch.supervisor import ProcessEvent, ProcessState
from tests.chaos.resources import (
  DESCRIPTORS_MAX,
  RSS_BYTES_MAX,
  THREADS_MAX,
  Growth,
  ResourceWatch,
  Sample,
)

PAIR_SHARE = 0.2  # Of the strikes, two processes at once.
START_UP_SHARE = 0.3  # While the last ones killed start again.
START_UP_S = 5.0  # About what a process takes to be ready.
CALM_S = 1.5
ROUND_S = 60.0  # The longest time between two closes, with syncer and learner.
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


class Stillness:
  """Measures how long no round closed while the syncer and a learner lived."""

  def __init__(self):
    self.longest_s = 0.0
    self._since_s: float | None = None
    self._merges = 0

  def look(
    self, now_s: float, states: Sequence[ProcessState], merges: int
  ) -> float:
    """Returns for how long it has been so."""
    running = {state.name for state in states if state.pid is not None}
    # Before the first close everything compiles; that has its own deadline.
    if SYNCER not in running or len(running) < 2 or not merges:
      self._since_s = None
    elif self._since_s is None or merges > self._merges:
      self._since_s = now_s
    self._merges = merges
    still_s = 0.0 if self._since_s is None else now_s - self._since_s
    self.longest_s = max(self.longest_s, still_s)
    return still_s


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
    self._stillness = Stillness()
    roles = [SYNCER, *map(learner_name, range(config.protocol.learners))]
    self._resources = ResourceWatch(roles, hub=SYNCER)
    self._merges = self._read_lines = 0
    self._kills = 0
    self._ended: str | None = None  # Why before its time.
    self.run = LiveRun(
      config,
      arguments,
      workdir,
      config.run.restart_delay_s,
      announce=self._on_event,
      on_poll=self._look,
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
    run, data = self.run, self._config.data
    tokens = data.batch * data.seq_len
    growths = self._resources.growths()
    is_over = run.workdir.summary.exists()
    still_s = self._stillness.longest_s
    return [
      Check(
        'rounds go on closing',
        [self._ended] if self._ended else [],
        f'{self._merges} closed; never still for more than {still_s:.1f} s',
      ),
      Check(
        'nobody dies unexpectedly',
        run_checks.exits(run.events, is_over),
        f'{self._kills} killed by the soak',
      ),
      Check('versions rise by one', run_checks.versions(run.tape)),
      Check('whole steps', run_checks.whole_steps(run.tape, tokens)),
      Check('no contribution twice', run_checks.merged_once(run.tape)),
      Check('no step twice', steps_merged_once(run.tape, run.steps)),
      Check(
        'tokens balance',
        run_checks.tokens_balance(run.tape, run.steps, tokens),
        f'{sum(map(len, run.steps.values())) * tokens:,} tokens trained',
      ),
      Check('goodput is known', *self._goodput()),
      self._token_ledger(),
      _flat('memory', growths, 'rss_bytes', RSS_BYTES_MAX, 1e6, 'MB'),
      _flat('descriptors', growths, 'descriptors', DESCRIPTORS_MAX, 1, ''),
      _flat('threads', growths, 'threads', THREADS_MAX, 1, ''),
      Check('all processes are gone', self._resources.left()),
    ]

  def _goodput(self) -> tuple[list[str], str]:
    """Returns the findings on goodput, and its value as text."""
    tape = self.run.tape
    work = work_of_tape(reversed(tape), self._config.protocol.learners)
    if work is None:
      return ['no line of the tape says it'], ''
    return [], f'{work.goodput(max(x[names.TIME] for x in tape)):.1%}'

  def _token_ledger(self) -> Check:
    protocol = self._config.protocol
    rows = token_ledger.rows_of(
      self.run.workdir, protocol.fragments, protocol.blend
    )
    return Check(
      'every token is accounted for',
      run_checks.tokens_explained(rows),
      token_ledger.text(token_ledger.total(rows.values())),
    )

  def samples(self) -> dict[str, list[Sample]]:
    """Returns the samples of each process, once it was warm."""
    return self._resources.samples()

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
    """Processes new tape lines and samples, at every poll."""
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
    still_s = self._stillness.look(
      time.monotonic(), self.run.supervisor.states(), self._merges
    )
    if still_s > ROUND_S:
      raise Overdue(
        f'no round closed for {still_s:.0f} s though the syncer and a learner '
        'lived'
      )

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


def steps_merged_once(
  tape: Iterable[Mapping], steps: Mapping[int, Sequence[WrittenStep]]
) -> list[str]:
  """No step of a process is in two contributions to one fragment.

  Stronger than `merged_once`: it sees through a new session of the process.
  """
  lives = {m: _lives(many) for m, many in steps.items()}
  until = {}  # (learner, process, fragment) -> last step, round.
  findings = []
  for line in run_checks.closed(tape):
    for share in line['shares']:
      m, incarnation = share['learner'], share['incarnation']
      # Killed before it wrote a step: the incarnation stands for the process.
      life = lives.get(m, {}).get(incarnation, incarnation)
      key = m, life, line['fragment']
      first = share['step'] - share['c_steps'] + 1
      last, round_ = until.get(key, (0, None))
      if first <= last:
        findings.append(
          f'learner {m}, fragment {key[2]}: step {first} is merged in round '
          f'{line["round"]}, and was in round {round_} (incarnation '
          f'{incarnation})'
        )
      until[key] = max(share['step'], last), line['round']
  return findings


def _lives(steps: Sequence[WrittenStep]) -> dict[int, int]:
  """Returns the count of the process of each incarnation."""
  life, found = 0, {}
  for i, step in enumerate(steps):
    life += run_checks.begins_process(steps, i)
    found.setdefault(step.incarnation, life)
  return found


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
