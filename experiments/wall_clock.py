# SPDX-License-Identifier: Apache-2.0
"""Prints what the gap is worth in tokens and in time, and draws a picture.

  python -m experiments.wall_clock [PICTURE.png]

From the results of `recipe.py`: the tokens with which data-parallel reaches the
loss of M learners, by its runs with other budgets; and the loss of both after
equal wall-clock on a fleet whose chips fail, and over links between two sites.
Whoever steps for more of the time trains more tokens, of which each is worth
less. Goodput and utilisation are the closed forms of `diloco.fleets`; that a
token's worth is the same at all budgets is assumed.
"""

import itertools
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from diloco.config import simulation
from diloco.fleets import failures, systems
from diloco.pages import figures
from diloco.pages.parts import Chart, Line
from diloco.studies import bandwidth
from diloco.sweeps import making, records, sweep
from experiments import bandwidth as links
from experiments import goodput, recipe

LEARNERS = (2, 4, 8)
GBPS = tuple(10 ** (i / 10 - 1) for i in range(31))  # 0.1 to 100.
OF_LINKS = 1.2e6  # Chips of the fleet whose sites the links join.

Losses = Mapping[str, float]  # By label.


def main(path: str | None) -> None:
  losses = mean_losses(records.Records(records.path_of(recipe.__file__)))
  worth = {m: tokens_worth(losses, f'M = {m}') for m in LEARNERS}
  for m, share in worth.items():
    print(f'M = {m}: data-parallel has its loss with {share:.1%} of the tokens')
  print('Loss against elastic data-parallel after equal wall-clock, in %:')
  for line in of_fleets(losses, worth):
    told = (f'{x:,.0f} chips {y:+.2f}' for x, y in zip(line.xs, line.ys))
    print(f'{line.label}:', *told, sep='  ')
  for line in picture(losses, worth).lines:
    ahead = [x for x, y in zip(line.xs, line.ys) if y < 0]
    told = f'ahead up to {max(ahead):.3g} Gbit/s' if ahead else 'behind'
    print(f'{line.label}, {OF_LINKS:,.0f} chips, two sites: {told}')
  if path:
    figures.save(picture(losses, worth), pathlib.Path(path))


def mean_losses(kept: records.Records) -> Losses:
  """Returns the loss of the average by label, over the seeds of the claim."""
  measure = sweep.Measure(making.AVERAGE, making.HALVES[recipe.HALF])
  base, rows = recipe.get_config().to_dict(), sweep.variants(recipe.sweep)
  found = making.kept_results(kept, base, rows, recipe.FIRST_SEED)
  losses = {
    label: [
      loss
      for result in results.values()
      if (loss := result.loss_of(measure)) is not None
    ]
    for label, results in found.items()
  }
  return {
    label: statistics.fmean(each) for label, each in losses.items() if each
  }


def curve(losses: Losses) -> list[tuple[float, float]]:
  """Returns data-parallel's losses by budget, in tokens of the recipe."""
  labels = {1.0: recipe.LABEL} | {x: recipe.budget(x) for x in recipe.BUDGETS}
  return sorted((x, losses[label]) for x, label in labels.items())


def loss_at(points: Sequence[tuple[float, float]], budget: float) -> float:
  """Interpolates, and goes on, linearly in the logarithm of the tokens."""
  for (x, y), (to_x, to_y) in itertools.pairwise(points):
    if budget <= to_x or (to_x, to_y) == points[-1]:
      share = math.log(budget / x) / math.log(to_x / x)
      return y + share * (to_y - y)
  raise ValueError('one budget is no curve')


def tokens_worth(losses: Losses, label: str) -> float:
  """Returns the budget with which data-parallel has the loss of a variant."""
  points, wanted = curve(losses), losses[label]
  low, high = 0.01, 100.0
  for _ in range(60):
    middle = math.sqrt(low * high)
    low, high = (
      (middle, high) if loss_at(points, middle) > wanted else (low, middle)
    )
  return high


def of_fleets(losses: Losses, worth: Mapping[int, float]) -> list[Line]:
  """Returns the loss against elastic data-parallel, in %, by chips."""
  config = simulation.build(goodput.get_config())
  chips = config.study.chips
  return [
    Line(
      f'M = {m}',
      'closed form',
      tuple(chips),
      tuple(
        _difference(losses, worth[m] * _good(n, m) / _good(n, 1)) for n in chips
      ),
      group=group,
    )
    for group, m in enumerate(worth)
  ]


def picture(losses: Losses, worth: Mapping[int, float]) -> Chart:
  """Returns the loss at equal wall-clock, by bandwidth."""
  config = simulation.build(links.get_config())
  every = bandwidth.methods(config, 2, 1.0)
  *_, ours = every.values()
  theirs = every[bandwidth.DATA_PARALLEL]
  lines = [
    Line(
      f'M = {m}',
      'closed form',
      GBPS,
      tuple(
        _difference(
          losses,
          worth[m]
          * _good(OF_LINKS, m)
          * ours.utilisation(x)
          / (_good(OF_LINKS, 1) * theirs.utilisation(x)),
        )
        for x in GBPS
      ),
      group=group,
    )
    for group, m in enumerate(worth)
  ]
  return Chart(
    'wall_clock',
    f'Equal wall-clock on {OF_LINKS / 1e6:g} M chips that fail, two sites',
    'Gbit/s between the sites',
    'loss against elastic data-parallel, %',
    tuple(lines),
    log_x=True,
  )


def _good(chips: float, learners: int) -> float:
  """Returns the goodput of elastic learners that share so many chips."""
  fleet = simulation.FailuresConfig()
  rate = failures.rate_per_s(int(chips), fleet.mtbi_days) / learners
  return systems.elastic_goodput(rate, fleet.pause_s)


def _difference(losses: Losses, budget: float) -> float:
  points = curve(losses)
  return 100 * (loss_at(points, budget) / loss_at(points, 1.0) - 1)


if __name__ == '__main__':
  main(*[*sys.argv[1:], None][:1])
