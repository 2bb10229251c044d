# SPDX-License-Identifier: Apache-2.0
"""Runs without faults ("twins"), and the losses that they are compared by."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from diloco.metrics import names
from diloco.metrics.jsonl import from_the_end, read_jsonl
from diloco.metrics.run_progress import counter
from diloco.metrics.workdir import EVALUATOR, Workdir
from launch.chaos.conductor import READY_S, ChaosRun, Folder

# Losses are compared after these shares of the tokens: the last ones alone say
# little, as the loss falls ever more slowly.
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
WINDOW = 0.1  # A loss is the mean over so much of its tokens, the last ones.
SLOWER_MAX = 3.0  # A twin may take so many times the run's time.


def train(
  faulty: ChaosRun, folder: Folder, seconds: float, count: int, faster: float
) -> None:
  """Trains twins, one after the other, until they have merged as many tokens.

  Args:
    faulty: the run with faults.
    folder: of that run.
    seconds: that its plan took.
    count: number of twins.
    faster: by so much their `run.step_floor_s` is shorter.

  Raises:
    Overdue: a twin did not get there.
    live_run.RunFailed: its processes can't go on.
    Interrupted: by a signal.
  """
  found = evaluations(folder.workdir)
  if count and not found:
    faulty.say('the run was never evaluated: there is no loss to compare')
    return
  floor_s = faulty.config.run.step_floor_s / faster
  for number in range(count):
    tokens = found[-1][0]
    what = f'twin {number + 1}'
    faulty.say(f'{what} of {count}: {tokens:,} tokens, no fault')
    workdir = Workdir(folder.twin(number))
    workdir.root.mkdir(parents=True, exist_ok=True)
    # It runs the same programs.
    workdir.compiled.symlink_to(folder.workdir.compiled.absolute())
    run = dataclasses.replace(faulty.config.run, step_floor_s=floor_s)
    twin = dataclasses.replace(
      faulty,
      config=dataclasses.replace(faulty.config, run=run),
      arguments=[*faulty.arguments, f'--config.run.step_floor_s={floor_s!r}'],
      workdir=workdir,
      seed=number,
    )
    twin.without_faults(
      _have_merged(workdir, tokens, counter(faulty.show, f'tokens, {what}')),
      SLOWER_MAX * seconds + READY_S,
      f'{what} merges {tokens:,} tokens',
    )


def _have_merged(
  workdir: Workdir, tokens: int, far: Callable[[int, int], None]
) -> Callable[[], bool]:
  def holds() -> bool:
    merged = 0
    for line in from_the_end(workdir.metrics(EVALUATOR)):
      merged = int(line[names.MERGED_TOKENS])
      break
    far(min(merged, tokens), tokens)
    return merged >= tokens

  return holds


def evaluations(workdir: Workdir) -> list[tuple[int, float]]:
  """Returns (merged tokens, loss of Θ on held-out text), in order."""
  path = workdir.metrics(EVALUATOR)
  lines = read_jsonl(path) if path.exists() else []
  return [
    (int(x[names.MERGED_TOKENS]), float(x[names.EVAL_LOSS])) for x in lines
  ]


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


def losses(folder: Folder) -> tuple[Losses, ...]:
  """Returns the losses of a run and its twins, after ever more merged tokens.

  Empty if there are no twins.
  """
  twins = []
  while folder.twin(len(twins)).exists():
    twins.append(evaluations(Workdir(folder.twin(len(twins)))))
  runs = [evaluations(folder.workdir), *twins]
  if not all(runs) or not twins:
    return ()
  most = min(each[-1][0] for each in runs)
  found = []
  for share in SHARES:
    tokens = round(share * most)
    own, *others = (_loss_at(each, tokens) for each in runs)
    found.append(Losses(tokens, own, tuple(others)))
  return tuple(found)


def _loss_at(found: Sequence[tuple[int, float]], tokens: int) -> float:
  """Returns the mean of the evaluations in the last tenth of so many tokens;
  where there is none, the nearest one.
  """
  within = [loss for at, loss in found if (1 - WINDOW) * tokens <= at <= tokens]
  nearest = min(found, key=lambda each: abs(each[0] - tokens))
  return statistics.fmean(within or [nearest[1]])
