# SPDX-License-Identifier: Apache-2.0
"""The page of the studies' results is that of the results that are kept."""

from diloco.config import run_config
from diloco.sweeps import records
from diloco.sweeps.sweep import SeedResult
from experiments import recipe, tried
from tests.repository import tree

MINUS = '\N{MINUS SIGN}'


def test_the_page_is_of_the_records():
  page = (tried.HERE / 'README.md').read_text()
  assert page == tried.text(), 'run python -m experiments.tried'


def test_the_claim_s_figures_in_pages_are_of_the_records():
  """The results page has all of them, that of the studies those by M."""
  found = {x.variant.label: x for x in tried.compared(recipe)}
  results, readme, studies = (
    ' '.join((tree.ROOT / page).read_text().replace(MINUS, '-').split())
    for page in ('docs/results.md', 'README.md', 'experiments/README.md')
  )
  by_number = [found[f'M = {m}'] for m in recipe.LEARNERS]
  for each in found.values():
    if each.difference is not None:
      told = f'{100 * each.difference:+.2f} ± {100 * each.half_width:.2f}'
      assert told in results, each.variant.label
      assert told in studies or each not in by_number, each.variant.label
  assert ', '.join(f'{100 * x.difference:+.1f}' for x in by_number) in readme
  seeds = f'{len(by_number[0].results)} seeds'
  assert seeds in readme and seeds in results


def test_a_run_is_counted_in_its_variant_s_row_or_has_its_own(tmp_path):
  """One of another seed, and one of a setting that the file does not have."""
  kept = records.Records(tmp_path / 'recipe.json')
  config = recipe.get_config()
  for label, changes, seeds in (
    ('data-parallel', recipe.DATA_PARALLEL, (3, 10, 11)),
    ('M = 2', recipe.learners(2), (10,)),
    ('M = 4', recipe.learners(4), (3, 10, 11)),
    ('at another rate', recipe.learners(4) | {'inner.lr': 0.123}, (3, 10, 11)),
  ):
    config.update_from_flattened_dict(changes)
    flat = records.flat(run_config.build(config))
    for seed in seeds:
      loss = 1.0 + 0.01 * (label == 'M = 4') + seed
      halves = {'loss': (9.0, loss), 'average_loss': (9.0, loss)}
      made = SeedResult(5.0, 5.0, (), 1, 1.0, 1.0, 1.0, halves=halves)
      kept.add(label, seed, flat, made)
    config = recipe.get_config()
  now, _, former = tried.section(kept.path).partition('Of other seeds')
  two, four = (
    line.split(' | ')[1:6]
    for line in now.splitlines()
    if line.startswith(('| M = 2', '| M = 4'))
  )
  assert two == ['1', '11.0000', '-', 'data-parallel', '+0.00 %']
  seeds, _, _, against, difference = four
  assert (seeds, against) == ('2', 'data-parallel')
  assert difference.startswith('+0.09 ± ')
  others = [line.split(' | ')[:2] for line in former.splitlines()[4:] if line]
  assert others == [
    ['| data-parallel', '3'],
    ['| M = 4', '3'],
    ['| at another rate', '3'],
    ['| at another rate', '10'],
    ['| at another rate', '11'],
  ]


def test_only_the_claim_s_seeds_and_half_count(tmp_path):
  kept = records.Records(tmp_path / 'kept.json')
  config = recipe.get_config()
  config.update_from_flattened_dict(recipe.learners(2))
  flat = records.flat(run_config.build(config))
  for seed, loss in ((0, 9.0), (10, 2.0), (11, 4.0)):
    halves = {'average_loss': (7.0, loss)}
    made = SeedResult(5.0, 5.0, (), 1, 1.0, 1.0, 1.0, halves=halves)
    kept.add('named otherwise', seed, flat, made)
  [found] = tried.compared(recipe, kept)
  assert (found.variant.label, found.mean) == ('M = 2', 3.0)
