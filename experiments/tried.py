# SPDX-License-Identifier: Apache-2.0
"""Prints every setting that was tried, as a table: python -m experiments.tried

From the results in `experiments/records`, one table for each experiment, in
Markdown: mean and standard deviation over seeds of the loss on the half of the
held-out text that the experiment is compared on, at the end of the run and of
the average over its last steps.
"""

import pathlib
import runpy
import statistics

from diloco.sweeps import making, sweep
from diloco.sweeps.records import FOLDER, Records

HERE = pathlib.Path(__file__).parent
COLUMNS = 'setting', 'seeds', 'loss', 'average', 'code'


def main() -> None:
  for path in sorted((HERE / FOLDER).glob('*.json')):
    half = runpy.run_path(str(HERE / f'{path.stem}.py')).get('HALF', '')
    print(f'`{path.stem}.py`, on {half or "all"} of the held-out text\n')
    print('\n'.join(table(Records(path), making.HALVES[half])), end='\n\n')


def table(kept: Records, half: int | None) -> list[str]:
  """Returns the lines of a table with a row for each configuration."""
  rows: dict[str, dict[int, sweep.SeedResult]] = {}
  for label, seed, _, result in kept.runs:
    rows.setdefault(label, {})[seed] = result
  lines = [_line(COLUMNS), _line('---' for _ in COLUMNS)]
  for label, runs in rows.items():
    losses = (
      [result.loss_of(sweep.Measure(name, half)) for result in runs.values()]
      for name in making.LOSSES
    )
    seeds = ', '.join(map(str, sorted(runs)))
    codes = ', '.join(sorted({result.code for result in runs.values()}))
    lines.append(_line((label, seeds, *map(_mean, losses), codes)))
  return lines


def _mean(losses) -> str:
  if None in losses:
    return ''
  mean, spread = statistics.fmean(losses), sweep.spread(losses)
  return f'{mean:.4f} ± {spread:.4f}' if len(losses) > 1 else f'{mean:.4f}'


def _line(cells) -> str:
  return f'| {" | ".join(map(str, cells))} |'


if __name__ == '__main__':
  main()
