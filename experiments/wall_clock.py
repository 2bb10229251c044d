# SPDX-License-Identifier: Apache-2.0
"""Prints what the gap is worth in tokens and in time, and draws a picture.

  python -m experiments.wall_clock [PICTURE.png]

From the results of `recipe.py`: the tokens with which data-parallel reaches the
loss of M learners, by its runs with other budgets; the loss of both after equal
wall-clock on a fleet whose chips fail; and the links between two sites over
which learners are ahead. Whoever steps for more of the time trains more tokens,
of which each is worth less. Both sides are elastic, of several slices. Goodput
and utilisation are the closed forms of `diloco.fleets`; that a token's worth is
the same at all budgets is assumed. The bands of the picture are the 95 %
intervals of the gaps at equal tokens.
"""

import itertools
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence

from diloco.config import simulation
from diloco.fleets import failures, systems
from diloco.pages import figures
from diloco.pages.parts import Chart, Line
from diloco.studies import bandwidth
from experiments import bandwidth as links
from experiments import goodput, recipe, tried

LEARNERS = (2, 4, 8)
CHIPS = tuple(1e5 * 2 ** (i / 4) for i in range(19))  # To 2.3 M.
GBPS = tuple(10 ** (i / 20) for i in range(61))  # 1 to 1000.

Losses = Mapping[str, float]  # By label.


def main(path: str | None) -> None:
  compared = {x.variant.label: x for x in tried.compared(recipe)}
  losses = {label: x.mean for label, x in compared.items()}
  errors = {m: 100 * compared[f'M = {m}'].half_width for m in LEARNERS}
  worth = {m: tokens_worth(losses, f'M = {m}') for m in LEARNERS}
  for m, share in worth.items():
    print(f'M = {m}: data-parallel has its loss with {share:.1%} of the tokens')
  chips = simulation.build(goodput.get_config()).study.chips
  print('Loss against elastic data-parallel after equal wall-clock, in %:')
  for line in picture(losses, worth, errors, chips).lines[1:]:
    told = (f'{x:,.0f} chips {y:+.2f}' for x, y in zip(line.xs, line.ys))
    print(f'{line.label}:', *told, sep='  ')
  print('Learners are ahead on two sites whose link has at most:')
  for m, share in worth.items():
    told = (f'{n:,.0f} chips {ahead_up_to(m, share, n)}' for n in chips)
    print(f'M = {m}:', *told, sep='  ')
  if path:
    figures.save(picture(losses, worth, errors), pathlib.Path(path))


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


def picture(
  losses: Losses,
  worth: Mapping[int, float],
  errors: Mapping[int, float],
  chips: Sequence[float] = CHIPS,
) -> Chart:
  """Returns the loss at equal wall-clock on one site, by chips.

  Args:
    losses: by label.
    worth: of M learners' tokens, in those of data-parallel.
    errors: half of the 95 % interval of their gap at equal tokens, in %.
    chips: of the fleet.
  """
  xs = tuple(chips)
  of_learners = [
    Line(
      f'M = {m}',
      'closed form',
      xs,
      tuple(_difference(losses, share * _more_steps(m, n)) for n in xs),
      spreads=(errors[m],) * len(xs),
      group=group,
    )
    for group, (m, share) in enumerate(worth.items())
  ]
  zero = Line(
    'elastic data-parallel', 'closed form', xs, (0.0,) * len(xs), ink=True
  )
  return Chart(
    'wall_clock',
    'Equal wall-clock on a fleet that fails',
    'chips, with an interruption each a year',
    'loss against elastic data-parallel, %',
    (zero, *of_learners),
    log_x=True,
  )


def ahead_up_to(learners: int, worth: float, chips: float) -> str:
  """Returns the bandwidth between two sites up to which learners are ahead.

  Of a model of 5 B parameters with steps of 1 s, as of `bandwidth.py`.
  """
  config = simulation.build(links.get_config())
  every = bandwidth.methods(config, 2, 1.0)
  *_, ours = every.values()
  theirs = every[bandwidth.DATA_PARALLEL]
  ahead = [
    x
    for x in GBPS
    if worth * _more_steps(learners, chips) * ours.utilisation(x)
    > theirs.utilisation(x)
  ]
  if not ahead:
    return 'no bandwidth'
  return 'any' if ahead[-1] == GBPS[-1] else f'{ahead[-1]:.0f} Gbit/s'


def _more_steps(learners: int, chips: float) -> float:
  """Returns how many times the steps of elastic data-parallel they make."""
  return _good(chips, learners) / _good(chips, 1)


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
