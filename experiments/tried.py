# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of the lab's studies: python -m experiments.tried

From the results in `experiments/records` into its README.md, a section for each
experiment: every variant that has a result, with intervals of the differences,
on the seeds and the half of the held-out text that the experiment asks for.
Runs of other seeds, or of settings that the file no longer has, follow, so that
all that was tried is listed.
"""

import importlib
import pathlib
import types
from collections.abc import Sequence

from diloco.sweeps import making, records, sweep

FIRST_SEED, HALF = making.OF_SWEEP
HERE = pathlib.Path(__file__).parent / records.FOLDER
HEAD = """\
# Results of the lab's studies

Written by `python -m experiments.tried` from the files beside it, which a sweep
adds to. Losses in nats per byte on held-out text, ± their standard deviation
over seeds; a difference is the mean of those paired by seed, with its 95 %
interval by Student's t; "code" is the fingerprint of the code that made the
runs.
"""


def main() -> None:
  (HERE / 'README.md').write_text(text())


def text() -> str:
  """Returns the page."""
  return '\n'.join([HEAD, *map(section, sorted(HERE.glob('*.json')))])


def section(path: pathlib.Path) -> str:
  """Returns the tables of an experiment, in Markdown."""
  module = importlib.import_module(f'experiments.{path.stem}')
  kept = records.Records(path)
  results = results_of(module, kept)
  question, _, _ = module.__doc__.partition('\n\n')
  half = half_of(module)
  seeds = sorted({seed for each in results.values() for seed in each})
  of_text = f'the {half} half' if half else 'all'
  lines = [
    f'## `{path.stem}.py`\n',
    f'{question}\n',
    f'    python -m diloco.lab --config=experiments/{path.stem}.py --sweep\n',
    f'Seeds {", ".join(map(str, seeds))}; {of_text} of the held-out text.\n',
  ]
  of_losses = (compared(module, kept, name) for name in making.LOSSES)
  lines += markdown(*making.columns_and_cells(*of_losses))
  if former := _former(kept, results):
    lines += ['\nOf other seeds, or of settings that the file no longer has:\n']
    lines += markdown(('setting', 'seed', 'loss', 'code'), former)
  return '\n'.join([*lines, ''])


def results_of(
  module: types.ModuleType, kept: records.Records
) -> dict[str, dict[int, sweep.SeedResult]]:
  """Returns an experiment's results as it stands, by label and seed."""
  base, rows = module.get_config().to_dict(), sweep.variants(module.sweep)
  first = getattr(module, FIRST_SEED, making.OF_SWEEP[FIRST_SEED])
  return making.kept_results(kept, base, rows, first)


def half_of(module: types.ModuleType) -> str:
  """Returns on which half of the held-out text an experiment counts."""
  return getattr(module, HALF, making.OF_SWEEP[HALF])


def compared(
  module: types.ModuleType,
  kept: records.Records | None = None,
  name: str = making.AVERAGE,
) -> list[sweep.Comparison]:
  """Compares an experiment's variants.

  Args:
    kept: the experiment's own file, if None.
    name: of the loss; see `sweep.Measure`.
  """
  kept = kept or records.Records(records.path_of(module.__file__))
  measure = sweep.Measure(name, making.HALVES[half_of(module)])
  rows = sweep.variants(module.sweep)
  return sweep.compare(results_of(module, kept), rows, measure)


def _former(kept: records.Records, results) -> list[list[str]]:
  """Returns the runs that are no result of a variant of now."""
  now = [id(x) for each in results.values() for x in each.values()]
  return [
    [label, str(seed), f'{result.loss:.4f}', result.code]
    for label, seed, _, result in kept.runs
    if id(result) not in now
  ]


def markdown(
  columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> list[str]:
  """Returns the lines of a table."""
  return [
    f'| {" | ".join(cells)} |'
    for cells in (columns, ['---'] * len(columns), *rows)
  ]


if __name__ == '__main__':
  main()
