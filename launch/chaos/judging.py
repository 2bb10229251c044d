# SPDX-License-Identifier: Apache-2.0
"""Trains the fault-free twins, judges a run, and shows the verdict."""

import collections
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Sequence

import rich.console
import rich.table

from diloco.config.run_config import RunConfig
from diloco.metrics import files, names
from diloco.metrics.jsonl import from_the_end, read_jsonl
from diloco.metrics.run_progress import counter
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name
from diloco.pages import text_tables
from launch.chaos import record as chaos_record
from launch.chaos import verdict as chaos_verdict
from launch.chaos.conductor import READY_S, ChaosRun, Folder
from launch.chaos.outcomes import Outcome
from launch.chaos.verdict import Check, Losses, Verdict
from launch.program import Processes

# Losses are compared after these shares of the tokens: the last ones alone say
# little, as the loss falls ever more slowly.
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
WINDOW = 0.1  # A loss is the mean over so much of its tokens, the last ones.
SLOWER_MAX = 3.0  # A twin may take so many times the run's time.
SHOWN_MAX = 5  # Findings of one check; all of them are in the JSON file.
NOTHING = '—'


class Twins:
  """Runs without faults of the same configuration.

  Args:
    arguments: the flags that give a process this configuration.
    learners: of what each learner consists.
    say: takes a line for the user.
    received: signals that ask to stop.
    faster: by so much `run.step_floor_s` is shorter than the run's.
    show: takes how far it is.
  """

  def __init__(
    self,
    config: RunConfig,
    arguments: Sequence[str],
    learners: Sequence[Processes],
    say: Callable[[str], None],
    received: list[int],
    faster: float,
    show: Callable[[str], None],
  ):
    floor_s = config.run.step_floor_s / faster
    run = dataclasses.replace(config.run, step_floor_s=floor_s)
    self._config = dataclasses.replace(config, run=run)
    self._arguments = [*arguments, f'--config.run.step_floor_s={floor_s!r}']
    self._learners = learners
    self._say = say
    self._show = show
    self._received = received

  def train(self, folder: Folder, seconds: float, count: int) -> None:
    """Trains `count` twins until they have merged as many tokens.

    Args:
      folder: of the run with faults.
      count: number of twins, one after the other.

    Raises:
      Overdue: a twin did not get there.
      live_run.RunFailed: its processes can't go on.
      Interrupted: by a signal.
    """
    found = evaluations(folder.workdir)
    if count and not found:
      self._say('the run was never evaluated: there is no loss to compare')
      return
    for number in range(count):
      tokens = found[-1][0]
      self._say(f'twin {number + 1} of {count}: {tokens:,} tokens, no fault')
      workdir = Workdir(folder.twin(number))
      workdir.root.mkdir(parents=True, exist_ok=True)
      # It runs the same programs.
      workdir.compiled.symlink_to(folder.workdir.compiled.absolute())
      far = counter(self._show, f'tokens, twin {number + 1} of {count}')
      ChaosRun(
        self._config,
        self._arguments,
        workdir,
        self._learners,
        self._say,
        self._received,
        number,
        self._show,
      ).without_faults(
        lambda: _has_merged(workdir, tokens, far),  # noqa: B023
        SLOWER_MAX * seconds + READY_S,
        f'twin {number + 1} merges {tokens:,} tokens',
      )


def _has_merged(
  workdir: Workdir, tokens: int, far: Callable[[int, int], None]
) -> bool:
  merged = _merged_tokens(workdir)
  far(min(merged, tokens), tokens)
  return merged >= tokens


def _merged_tokens(workdir: Workdir) -> int:
  """Returns the tokens merged until the last evaluation; asked for often."""
  for line in from_the_end(workdir.metrics(EVALUATOR)):
    return int(line[names.MERGED_TOKENS])
  return 0


def evaluations(workdir: Workdir) -> list[tuple[int, float]]:
  """Returns (merged tokens, loss of Θ on held-out text), in order."""
  path = workdir.metrics(EVALUATOR)
  lines = read_jsonl(path) if path.exists() else []
  return [
    (int(x[names.MERGED_TOKENS]), float(x[names.EVAL_LOSS])) for x in lines
  ]


def losses(folder: Folder) -> tuple[Losses, ...]:
  """Returns the losses of a run and its twins, after ever more merged tokens.

  Empty if there are no twins.
  """
  twins, number = [], 0
  while folder.twin(number).exists():
    twins.append(evaluations(Workdir(folder.twin(number))))
    number += 1
  own = evaluations(folder.workdir)
  if not own or not all(twins) or not twins:
    return ()
  most = min(each[-1][0] for each in (own, *twins))
  return tuple(
    Losses(
      tokens, _loss_at(own, tokens), tuple(_loss_at(x, tokens) for x in twins)
    )
    for tokens in (round(share * most) for share in SHARES)
  )


def _loss_at(found: Sequence[tuple[int, float]], tokens: int) -> float:
  """Returns the mean of the evaluations in the last tenth of so many tokens;
  where there is none, the nearest one.
  """
  within = [loss for at, loss in found if (1 - WINDOW) * tokens <= at <= tokens]
  nearest = min(found, key=lambda each: abs(each[0] - tokens))
  return statistics.fmean(within or [nearest[1]])


def judge(workdir: Workdir, console: rich.console.Console) -> int:
  """Judges the run in a folder, writes and shows the verdict.

  Returns:
    The exit code: 0 if it holds, 1 if not.
  """
  folder = Folder(workdir)
  record = chaos_record.read(workdir)
  seed = json.loads(folder.plan.read_text())['seed']
  verdict = chaos_verdict.judge(record, seed, losses(folder))
  files.write_json(
    folder.verdict, {'holds': verdict.holds, **dataclasses.asdict(verdict)}
  )
  for view in (
    _kinds(verdict),
    _figures(verdict),
    check_table('checks', verdict.checks),
  ):
    console.print(view)
    console.print()
  for outcome in verdict.outcomes:
    console.print(_line(outcome), markup=False, highlight=False)
  word = 'holds' if verdict.holds else 'DOES NOT HOLD'
  console.print(
    f'the verdict {word}: {folder.verdict}', markup=False, highlight=False
  )
  return 0 if verdict.holds else 1


# The tables -------------------------------------------------------------------


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
  """Returns the outcomes of each kind, by name."""
  found = collections.defaultdict(list)
  for outcome in outcomes:
    found[outcome.kind].append(outcome)
  return dict(sorted(found.items()))


def _kinds(verdict: Verdict) -> rich.table.Table:
  rows = []
  for kind, many in by_kind(verdict.outcomes).items():
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


def _figures(verdict: Verdict) -> rich.table.Table:
  return text_tables.table(
    'the run', ('', 'processes', 'simulated', 'twins'), figure_rows(verdict)
  )


def figure_rows(verdict: Verdict) -> Iterator[tuple[str, str, str, str]]:
  """Yields what is said of the run, of its simulation, and of its twins."""
  real, simulation = verdict.real, verdict.simulation
  for name, get, form in (
    ('goodput', lambda x: x.goodput, '{:.1%}'),
    ('uptime', lambda x: x.uptime, '{:.1%}'),
    ('rounds closed', lambda x: x.rounds, '{:,}'),
    ('inner steps', lambda x: x.steps, '{:,}'),
    ("longest stall of a survivor's step, s", _stall, '{:.2f}'),
  ):
    yield name, form.format(get(real)), form.format(get(simulation)), NOTHING
  for m, share in real.participation.items():
    other = simulation.participation.get(m)
    told = NOTHING if other is None else f'{other:.0%}'
    yield f'rounds with {learner_name(m)}', f'{share:.0%}', told, NOTHING
  for reason in sorted({*real.refused, *simulation.refused}):
    count, other = (x.refused.get(reason, 0) for x in (real, simulation))
    yield f'refused: {reason}', str(count), str(other), NOTHING
  for each in verdict.losses:
    twins = ', '.join(f'{x:.4f}' for x in each.twins)
    name = f'loss after {each.tokens:,} merged tokens'
    yield name, f'{each.run:.4f}', NOTHING, twins


def _stall(figures) -> float:
  return figures.longest_stall_s


def check_table(title: str, checks: Sequence[Check]) -> rich.table.Table:
  """Returns a row for each check."""
  return text_tables.table(
    title,
    ('check', 'holds', 'found'),
    [
      (x.name, 'NO' if x.findings else 'yes', '\n'.join(_found(x)))
      for x in checks
    ],
    left=3,
  )


def _found(check: Check) -> Iterator[str]:
  if check.note:
    yield check.note
  yield from check.findings[:SHOWN_MAX]
  if (more := len(check.findings) - SHOWN_MAX) > 0:
    yield f'and {more} more'


def _line(x: Outcome) -> str:
  if x.begun_s is None:
    return f'   — s  {x.number}: {x.kind} {x.target}: {x.failed}'
  back = 'gone for good' if x.back_s is None else f'back after {x.back_s:.1f} s'
  return f'{x.begun_s:6.1f} s  {x.number}: {x.kind} {x.target}: {back}'
