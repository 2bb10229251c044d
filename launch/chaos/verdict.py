# SPDX-License-Identifier: Apache-2.0
"""Judges a chaos run by what it left in its folder; pure but for reading.

The simulated verdict stands beside it: same plan, speeds as measured here.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from diloco.faults import KINDS
from diloco.metrics import token_ledger
from launch.chaos import outcomes as chaos_outcomes
from launch.chaos import run_checks, simulated
from launch.chaos.conductor import Course
from launch.chaos.outcomes import Figures, Outcome
from launch.chaos.record import Record, begin_of, speed_of

GOODPUT_POINTS_MAX = 5.0  # Between the run and its simulation.
LOSS_SHARE_MAX = 0.05  # Above the twins, beside their own spread.
SPREADS_MAX = 3.0
# A step of a learner that no fault has hit may be so much too long. One that
# waited for the dead would be so for as long as they are away, 5 s and more.
STALL_S_MAX = 3.0
# On a busy machine: beside so many times the latest turn of the command itself.
LATE_TURNS = 10.0


@dataclasses.dataclass(frozen=True)
class Check:
  """One condition that must hold."""

  name: str
  findings: Sequence[str]  # None where it holds.
  note: str = ''  # What was measured, good or bad.


@dataclasses.dataclass(frozen=True)
class Losses:
  """Loss on held-out text after as many merged tokens, faults or none.

  Attributes:
    run: of the run with faults.
    twins: of the runs without.
  """

  tokens: int
  run: float
  twins: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The whole verdict; `holds` if no check found anything."""

  outcomes: tuple[Outcome, ...]
  real: Figures
  simulation: Figures
  losses: tuple[Losses, ...]  # At ever more tokens; empty: no twins.
  ledger: str
  checks: tuple[Check, ...]

  @property
  def holds(self) -> bool:
    return not any(check.findings for check in self.checks)


def checks(
  record: Record,
  found: Sequence[Outcome],
  real: Figures,
  simulation: Figures,
  losses: Sequence[Losses],
) -> tuple[Check, ...]:
  """Returns all that must hold, with what was found."""
  tape, tokens = record.tape, record.tokens_per_step
  total = token_ledger.total(record.ledger.values())
  points = 100 * (real.goodput - simulation.goodput)
  far = abs(points) > GOODPUT_POINTS_MAX
  return (
    Check('the plan was performed', tuple(_unperformed(found))),
    Check(
      'link faults moved their counters', tuple(_idle(found)), _unused(found)
    ),
    Check(
      'all are back at the end',
      (record.course.unready,) if record.course.unready else (),
    ),
    Check(
      'no process dies by itself', tuple(run_checks.exits(record.events, False))
    ),
    Check('versions rise by one', tuple(run_checks.versions(tape))),
    Check('whole steps', tuple(run_checks.whole_steps(tape, tokens))),
    Check('no contribution twice', tuple(run_checks.merged_once(tape))),
    Check(
      'no more merged than trained',
      tuple(run_checks.tokens_balance(tape, record.steps, tokens)),
    ),
    Check(
      'every token is accounted for',
      tuple(run_checks.tokens_explained(record.ledger)),
      token_ledger.text(total),
    ),
    _unstalled(record.course, found),
    Check('all processes are gone', record.course.left),
    Check(
      'goodput is as simulated',
      (f'{points:+.1f} points, at most {GOODPUT_POINTS_MAX:g}',) if far else (),
      f'{points:+.1f} points',
    ),
    *([_near(losses)] if losses else []),
  )


def _unstalled(course: Course, found: Iterable[Outcome]) -> Check:
  """Learners that nothing has hit step on, as far as the machine lets them."""
  findings, longest_s, latest_s = [], 0.0, 0.0
  for x in found:
    if x.failed:
      continue
    begin_s = course.began_s + x.begun_s
    end_s = course.ended_s if x.back_s is None else begin_s + x.back_s
    late_s = max(
      (
        late_s
        for at_s, late_s in course.late_turns
        if at_s >= begin_s and at_s - late_s <= end_s
      ),
      default=0.0,
    )
    most_s = STALL_S_MAX + LATE_TURNS * late_s
    longest_s, latest_s = max(longest_s, x.stall_s), max(latest_s, late_s)
    if x.stall_s > most_s:
      findings.append(
        f'fault {x.number}, {x.kind} {x.target}: another learner stood for '
        f'{x.stall_s:.2f} s, at most {most_s:.2f}'
      )
  note = (
    f'at most {longest_s:.2f} s; the command itself was at most '
    f'{latest_s:.2f} s late'
  )
  return Check('the others step on', tuple(findings), note)


def _unperformed(found: Iterable[Outcome]) -> Iterable[str]:
  return (
    f'fault {x.number}, {x.kind} {x.target}: {x.failed}'
    for x in found
    if x.failed
  )


def _idle(found: Iterable[Outcome]) -> Iterable[str]:
  return (
    f'fault {x.number}, {x.kind} {x.target}: it changed nothing, '
    f'{" and ".join(KINDS[x.kind].counters)} stayed 0'
    for x in found
    if x.counted == 0 and x.in_use
  )


def _unused(found: Iterable[Outcome]) -> str:
  """Returns which faults found nothing to act on, as their link's one end was
  starting.
  """
  idle = [str(x.number) for x in found if x.counted == 0 and not x.in_use]
  return (
    f'not in use then, its end being away: {", ".join(idle)}' if idle else ''
  )


def _near(losses: Sequence[Losses]) -> Check:
  found, told = [], []
  for each in losses:
    mean = statistics.fmean(each.twins)
    spread = max(each.twins) - min(each.twins)
    above = each.run - mean
    told.append(f'{above:+.4f} ({spread:.4f})')
    if above > max(SPREADS_MAX * spread, LOSS_SHARE_MAX * abs(mean)):
      found.append(
        f'after {each.tokens:,} tokens {above:+.4f} from the twins, which '
        f'differ by {spread:.4f}'
      )
  note = f'from the twins (their spread): {", ".join(told)}'
  return Check('loss is as without faults', tuple(found), note)


def judge(record: Record, seed: int, losses: Sequence[Losses]) -> Verdict:
  """Returns the verdict, with that of the simulation beside it."""
  begin_s = begin_of(record)
  begun_s = record.course.began_s - begin_s
  run = simulated.simulate(
    record.config.protocol,
    record.config.syncer.shards,
    record.tokens_per_step,
    speed_of(record),
    record.plan,
    (begun_s, record.course.ended_s - begin_s),
    seed,
  )
  found = chaos_outcomes.outcomes(record)
  real = chaos_outcomes.figures(record)
  simulation = chaos_outcomes.simulated_figures(record, run, begun_s)
  return Verdict(
    outcomes=found,
    real=real,
    simulation=simulation,
    losses=tuple(losses),
    ledger=token_ledger.text(token_ledger.total(record.ledger.values())),
    checks=(
      *checks(record, found, real, simulation, losses),
      Check('simulated versions rise by one', run.versions),
    ),
  )
