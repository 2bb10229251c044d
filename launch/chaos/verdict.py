# SPDX-License-Identifier: Apache-2.0
"""Judges a chaos run by what it left in its folder; pure but for reading.

The simulated verdict stands beside it: same plan, speeds as measured here.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from diloco.metrics import token_ledger
from launch.chaos import outcomes as chaos_outcomes
from launch.chaos import resources, run_checks, simulated
from launch.chaos.faults import KINDS
from launch.chaos.outcomes import Figures, Outcome
from launch.chaos.record import Record, begin_of, speed_of

GOODPUT_POINTS_MAX = 5.0  # Between the run and its simulation.
LOSS_SHARE_MAX = 0.05  # Above the twins, beside their own spread.
SPREADS_MAX = 3.0


@dataclasses.dataclass(frozen=True)
class Check:
  """One condition that must hold."""

  name: str
  findings: Sequence[str]  # None where it holds.
  note: str = ''  # What was measured, good or bad.


@dataclasses.dataclass(frozen=True)
class Losses:
  """Loss on held-out text after as many merged tokens, faults or none."""

  tokens: int
  run: float
  twins: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The whole verdict; `holds` if no check found anything."""

  outcomes: tuple[Outcome, ...]
  real: Figures
  simulation: Figures
  losses: Losses | None
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
  losses: Losses | None,
) -> tuple[Check, ...]:
  """Returns all that must hold, with what was found."""
  tape, tokens = record.tape, record.tokens_per_step
  total = token_ledger.total(record.ledger.values())
  points = 100 * (real.goodput - simulation.goodput)
  far = abs(points) > GOODPUT_POINTS_MAX
  return (
    Check('the plan was performed', tuple(_unperformed(found))),
    Check('link faults moved their counters', tuple(_idle(found))),
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
    *_flat(record.course.growths),
    Check('all processes are gone', record.course.left),
    Check(
      'goodput is as simulated',
      (f'{points:+.1f} points, at most {GOODPUT_POINTS_MAX:g}',) if far else (),
      f'{points:+.1f} points',
    ),
    *([_near(losses)] if losses else []),
  )


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
    if x.counted == 0
  )


def _flat(growths: Sequence[Mapping]) -> Iterable[Check]:
  limits = (
    ('memory is flat', 'rss_bytes', resources.RSS_BYTES_MAX, 1e6, 'MB'),
    ('descriptors are flat', 'descriptors', resources.DESCRIPTORS_MAX, 1, ''),
    ('threads are flat', 'threads', resources.THREADS_MAX, 1, ''),
  )
  for name, field, most, unit, word in limits:
    lines = tuple(
      f'{g["name"]} ({g["pid"]}): {g[field] / unit:+.1f} {word} per minute, at '
      f'most {most / unit:.0f} is flat'
      for g in growths
      if g[field] > most
    )
    note = 'no process was long enough at work with all others to tell'
    if growths:
      worst = max(g[field] for g in growths) / unit
      note = f'{len(growths)} processes, at most {worst:+.1f} {word} a minute'
    yield Check(name, lines, ' '.join(note.split()))


def _near(losses: Losses) -> Check:
  mean = statistics.fmean(losses.twins)
  spread = max(losses.twins) - min(losses.twins)
  above = losses.run - mean
  note = f'{above:+.4f} from the twins, which differ by {spread:.4f}'
  far = above > max(SPREADS_MAX * spread, LOSS_SHARE_MAX * abs(mean))
  return Check('loss is as without faults', (note,) if far else (), note)


def judge(record: Record, seed: int, losses: Losses | None) -> Verdict:
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
    losses=losses,
    ledger=token_ledger.text(token_ledger.total(record.ledger.values())),
    checks=(
      *checks(record, found, real, simulation, losses),
      Check('simulated versions rise by one', run.versions),
    ),
  )
