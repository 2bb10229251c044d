# SPDX-License-Identifier: Apache-2.0
"""Judges a chaos run by what it left in its folder, and shows the verdict.

Next to it stands the twin of `diloco.prediction`: the same plan, at the speeds
that were measured in the run.
"""

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence

import rich.console
import rich.table

from diloco.faults import KINDS
from diloco.metrics import files, recorded_run, token_ledger
from diloco.metrics.workdir import Workdir, learner_name
from diloco.pages import text_tables
from diloco.prediction import recorded, twin
from launch.chaos import baselines, checks
from launch.chaos import record as chaos_record
from launch.chaos.baselines import Losses
from launch.chaos.checks import Check
from launch.chaos.conductor import Folder
from launch.chaos.record import Effects, Figures, Outcome, Record

GOODPUT_POINTS_MAX = 5.0  # Between the run and its simulation.
LOSS_SHARE_MAX = 0.05  # Above the twins, beside their own spread.
SPREADS_MAX = 3.0
# A step of a learner that no fault has hit may be so much too long. One that
# waited for the dead would be so for as long as they are away, 5 s and more.
STALL_S_MAX = 3.0
# On a busy machine: beside so many times the latest turn of the command itself.
LATE_TURNS = 10.0
NOTHING = '—'


@dataclasses.dataclass(frozen=True)
class Evidence:
  """What a run is judged by; empty `losses`: it has no twins."""

  record: Record
  simulation: Figures
  losses: Sequence[Losses] = ()

  @functools.cached_property
  def effects(self) -> Effects:
    return Effects(self.record)

  @functools.cached_property
  def outcomes(self) -> tuple[Outcome, ...]:
    return self.effects.outcomes()

  @functools.cached_property
  def real(self) -> Figures:
    stall_s = self.effects.longest_stall_s()
    return chaos_record.figures(self.record, stall_s)

  @property
  def ledger(self) -> str:
    return token_ledger.text(token_ledger.total(self.record.ledger.values()))

  @property
  def idle(self) -> list[Outcome]:
    """The faults of links that no counter of the relay tells of."""
    return [x for x in self.outcomes if x.counted == 0]

  @property
  def points(self) -> float:
    return 100 * (self.real.goodput - self.simulation.goodput)


def _unmoved(given: Evidence) -> list[str]:
  return [
    f'{x}: it changed nothing, {" and ".join(KINDS[x.kind].counters)} stayed 0'
    for x in given.idle
    if given.effects.was_in_use(x)
  ]


def _unused(given: Evidence) -> str:
  away = [str(x.number) for x in given.idle if not given.effects.was_in_use(x)]
  return (
    f'not in use then, its end being away: {", ".join(away)}' if away else ''
  )


def _late_s(given: Evidence, x: Outcome) -> float:
  """Returns how late the command itself was while a fault lasted."""
  course = given.record.course
  begin_s = course.began_s + x.begun_s
  end_s = course.ended_s if x.back_s is None else begin_s + x.back_s
  return max(
    (
      late_s
      for at_s, late_s in course.late_turns
      if at_s >= begin_s and at_s - late_s <= end_s
    ),
    default=0.0,
  )


def _stalled(given: Evidence) -> list[str]:
  """Learners that nothing has hit step on, as far as the machine lets them."""
  return [
    f'{x}: another learner stood for {x.stall_s:.2f} s, at most {most_s:.2f}'
    for x in given.outcomes
    if not x.failed
    and x.stall_s > (most_s := STALL_S_MAX + LATE_TURNS * _late_s(given, x))
  ]


def _stalls(given: Evidence) -> str:
  hit = [x for x in given.outcomes if not x.failed]
  stall_s = max((x.stall_s for x in hit), default=0.0)
  late_s = max((_late_s(given, x) for x in hit), default=0.0)
  return (
    f'at most {stall_s:.2f} s; the command itself was at most {late_s:.2f} s '
    'late'
  )


def _far(given: Evidence) -> list[str]:
  if abs(given.points) <= GOODPUT_POINTS_MAX:
    return []
  return [f'{given.points:+.1f} points, at most {GOODPUT_POINTS_MAX:g}']


def _above(losses: Losses) -> tuple[float, float, float]:
  """Returns how far a loss is above its twins, may be, and their spread."""
  mean = statistics.fmean(losses.twins)
  spread = max(losses.twins) - min(losses.twins)
  most = max(SPREADS_MAX * spread, LOSS_SHARE_MAX * abs(mean))
  return losses.run - mean, most, spread


def _worse(given: Evidence) -> list[str]:
  return [
    f'after {each.tokens:,} tokens {above:+.4f} from the twins, which differ '
    f'by {spread:.4f}'
    for each in given.losses
    for above, most, spread in [_above(each)]
    if above > most
  ]


def _distances(given: Evidence) -> str:
  found = (_above(each) for each in given.losses)
  told = ', '.join(f'{above:+.4f} ({spread:.4f})' for above, _, spread in found)
  return f'from the twins (their spread): {told}'


@dataclasses.dataclass(frozen=True)
class Condition:
  """One row of `CHECKS`: what is found against it, and what was measured."""

  name: str
  findings: Callable[[Evidence], list[str]]
  note: Callable[[Evidence], str] = lambda given: ''


CHECKS = (
  Condition(
    'the plan was performed',
    lambda given: [f'{x}: {x.failed}' for x in given.outcomes if x.failed],
  ),
  Condition('link faults moved their counters', _unmoved, _unused),
  Condition(
    'all are back at the end',
    lambda given: [x for x in [given.record.course.unready] if x],
  ),
  Condition(
    'no process dies by itself',
    lambda given: checks.exits(given.record.events, False),
  ),
  Condition(
    'versions rise by one', lambda given: checks.versions(given.record.tape)
  ),
  Condition(
    'whole steps',
    lambda given: checks.whole_steps(
      given.record.tape, given.record.tokens_per_step
    ),
  ),
  Condition(
    'no contribution twice', lambda given: checks.merged_once(given.record.tape)
  ),
  Condition(
    'no more merged than trained',
    lambda given: checks.tokens_balance(
      given.record.tape, given.record.steps, given.record.tokens_per_step
    ),
  ),
  Condition(
    'every token is accounted for',
    lambda given: checks.tokens_explained(given.record.ledger),
    lambda given: given.ledger,
  ),
  Condition('the others step on', _stalled, _stalls),
  Condition(
    'goodput is as simulated', _far, lambda given: f'{given.points:+.1f} points'
  ),
)
LOSS = Condition('loss is as without faults', _worse, _distances)


def check(given: Evidence) -> tuple[Check, ...]:
  """Returns all that must hold, with what was found."""
  return tuple(
    Check(each.name, each.findings(given), each.note(given))
    for each in (*CHECKS, *([LOSS] if given.losses else []))
  )


def simulate(workdir: Workdir, record: Record, seed: int) -> Figures:
  """Returns the figures of the plan under the simulated clock."""
  run, course = recorded_run.read(workdir.root), record.course
  calm_s, began_s, ended_s = (
    at_s - record.begin_s
    for at_s in (course.calm_s, course.began_s, course.ended_s)
  )
  delay_s = record.config.run.restart_delay_s
  found = twin.simulate(
    record.config,
    recorded.measure(run, delay_s, (calm_s, began_s)),
    recorded.arrivals(run),
    record.plan,
    (began_s, ended_s),
    seed,
  )
  return Figures(
    goodput=found.goodput,
    uptime=found.uptime,
    rounds=found.rounds,
    steps=len(found.steps),
    longest_stall_s=None,
    participation={m: found.participation(m) for m in record.steps},
    refused=found.refused,
  )


def judge(workdir: Workdir, console: rich.console.Console) -> int:
  """Judges the run in a folder, writes and shows the verdict.

  Returns:
    The exit code: 0 if it holds, 1 if not.
  """
  folder = Folder(workdir)
  record = chaos_record.read(workdir)
  seed = json.loads(folder.plan.read_text())['seed']
  given = Evidence(
    record, simulate(workdir, record, seed), baselines.losses(folder)
  )
  found = check(given)
  holds = not any(each.findings for each in found)
  files.write_json(
    folder.verdict,
    {
      'holds': holds,
      'outcomes': list(map(dataclasses.asdict, given.outcomes)),
      'real': dataclasses.asdict(given.real),
      'simulation': dataclasses.asdict(given.simulation),
      'losses': list(map(dataclasses.asdict, given.losses)),
      'ledger': given.ledger,
      'checks': list(map(dataclasses.asdict, found)),
    },
  )
  run = text_tables.table(
    'the run', ('', 'processes', 'simulated', 'twins'), list(_rows(given))
  )
  for view in (_kinds(given.outcomes), run, checks.table('checks', found)):
    console.print(view)
    console.print()
  lines = [*map(_line, given.outcomes)]
  word = 'holds' if holds else 'DOES NOT HOLD'
  for line in (*lines, f'the verdict {word}: {folder.verdict}'):
    console.print(line, markup=False, highlight=False)
  return 0 if holds else 1


# The tables -------------------------------------------------------------------


def _kinds(outcomes: Sequence[Outcome]) -> rich.table.Table:
  rows = []
  for kind in sorted({x.kind for x in outcomes}):
    many = [x for x in outcomes if x.kind == kind]
    hit = [x for x in many if not x.failed]
    back_s = [x.back_s for x in hit if x.back_s is not None]
    counted = [x.counted for x in hit if x.counted is not None]
    rows.append(
      (
        kind,
        f'{len(hit)}/{len(many)}',
        f'{max(back_s):.1f}' if back_s else NOTHING,
        f'{sum(x.lost_s for x in hit):.1f}',
        f'{max((x.stall_s for x in hit), default=0.0):.2f}',
        f'{sum(counted):,}' if counted else NOTHING,
      )
    )
  return text_tables.table(
    'faults',
    (
      'kind',
      'hit',
      'back after, s',
      'lost, learner·s',
      "others' stall, s",
      'counted by the relay',
    ),
    rows,
  )


def _rows(given: Evidence) -> Iterator[tuple[str, str, str, str]]:
  """Yields what is said of the run, of its simulation, and of its twins."""
  both = given.real, given.simulation

  def row(name: str, form: str, values) -> tuple[str, str, str, str]:
    told = (NOTHING if x is None else form.format(x) for x in values)
    return name, *told, NOTHING

  for name, field, form in (
    ('goodput', 'goodput', '{:.1%}'),
    ('uptime', 'uptime', '{:.1%}'),
    ('rounds closed', 'rounds', '{:,}'),
    ('inner steps', 'steps', '{:,}'),
    ("longest stall of a survivor's step, s", 'longest_stall_s', '{:.2f}'),
  ):
    yield row(name, form, (getattr(x, field) for x in both))
  for m in given.real.participation:
    shares = (x.participation.get(m) for x in both)
    yield row(f'rounds with {learner_name(m)}', '{:.0%}', shares)
  for reason in sorted({*given.real.refused, *given.simulation.refused}):
    counts = (x.refused.get(reason, 0) for x in both)
    yield row(f'refused: {reason}', '{}', counts)
  for each in given.losses:
    twins = ', '.join(f'{x:.4f}' for x in each.twins)
    name = f'loss after {each.tokens:,} merged tokens'
    yield name, f'{each.run:.4f}', NOTHING, twins


def _line(x: Outcome) -> str:
  if x.begun_s is None:
    return f'   — s  {x.number}: {x.kind} {x.target}: {x.failed}'
  back = 'gone for good' if x.back_s is None else f'back after {x.back_s:.1f} s'
  return f'{x.begun_s:6.1f} s  {x.number}: {x.kind} {x.target}: {back}'
