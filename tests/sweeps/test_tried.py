# SPDX-License-Identifier: Apache-2.0
"""The page of the studies' results is that of the results that are kept."""

from diloco.config import run_config
from diloco.sweeps import records
from diloco.sweeps.sweep import SeedResult
from experiments import recipe, tried


def test_the_page_is_of_the_records():
  page = (tried.HERE / 'README.md').read_text()
  assert page == tried.text(), 'run python -m experiments.tried'


def test_a_run_is_counted_in_its_variant_s_row_or_has_its_own(tmp_path):
  """One of another seed, and one of a setting that the file does not have."""
  kept = records.Records(tmp_path / 'recipe.json')
  config = recipe.get_config()
  for label, changes in (
    ('data-parallel', recipe.DATA_PARALLEL),
    ('M = 4', recipe.learners(4)),
    ('at another rate', recipe.learners(4) | {'inner.lr': 0.123}),
  ):
    config.update_from_flattened_dict(changes)
    flat = records.flat(run_config.build(config))
    for seed in (3, 10, 11):
      loss = 1.0 + 0.01 * (label == 'M = 4') + seed
      halves = {'loss': (9.0, loss), 'average_loss': (9.0, loss)}
      made = SeedResult(5.0, 5.0, (), 1, 1.0, 1.0, 1.0, halves=halves)
      kept.add(label, seed, flat, made)
    config = recipe.get_config()
  now, _, former = tried.section(kept.path).partition('Of other seeds')
  rows = [line for line in now.splitlines() if line.startswith('| M = 4')]
  [(_, seeds, _, _, against, difference, *_)] = [x.split(' | ') for x in rows]
  assert (seeds, against) == ('2', 'data-parallel')
  assert difference.startswith('+0.09')
  others = [line.split(' | ')[:2] for line in former.splitlines()[4:] if line]
  assert others == [
    ['| data-parallel', '3'],
    ['| M = 4', '3'],
    ['| at another rate', '3'],
    ['| at another rate', '10'],
    ['| at another rate', '11'],
  ]
