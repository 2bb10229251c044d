# SPDX-License-Identifier: Apache-2.0
"""The page of a sweep; one folder is of a real sweep, cut down."""

import dataclasses
import math
import pathlib
import shutil

import pytest

from diloco.metrics.recorded_run import NoReport
from diloco.sweeps import sweep
from diloco.sweeps.sweep import SeedResult, Variant
from diloco.watch import sweep_page
from diloco.watch.folders import FollowedFolders

# Of experiments/tests_tiny.py, 60 steps, evaluated every 10, three seeds.
REAL = pathlib.Path(__file__).parent / 'tiny_sweep'
ROWS = [Variant('base', {}), Variant('a b', {'outer.lr': 0.7}, 'base')]


def result(*losses: float) -> SeedResult:
  curve = tuple((i, 100 * i, loss) for i, loss in enumerate(losses, start=1))
  return SeedResult(losses[-1], losses[-1], curve, 3, 0.5, 0.9, 2.0)


@pytest.fixture(name='root')
def fixture_root(tmp_path):
  root = tmp_path / 'sweep'
  sweep.write_variants(root, ROWS)
  for seed, losses in enumerate([(4.0, 2.0), (5.0, 4.0)]):
    sweep.write_into(sweep.folder(root, 'base', seed), result(*losses))
  for seed, losses in enumerate([(3.0, 2.2), (6.0, 4.8)]):
    sweep.write_into(sweep.folder(root, 'a b', seed), result(*losses))
  return root


def report(*roots):
  return FollowedFolders(roots, 'again').page()


def part(found, name):
  return next(p for p in found.parts if p.name == name)


def rows(found, name='sweep') -> list[dict]:
  table = part(found, name)
  headings = [column.name for column in table.columns]
  return [dict(zip(headings, row)) for row in table.rows]


def test_means_and_paired_differences(root):
  base, other = rows(report(root))
  assert (base['variant'], base['loss'], base['difference %']) == (
    'base',
    3.0,
    None,
  )
  assert other['difference %'] == pytest.approx((10 + 20) / 2)
  # s = 10 / √2, n = 2, t = 12.706: half of it is t · s / √2.
  assert other['half of the interval %'] == pytest.approx(12.7062 * 5)
  assert other['against'] == 'base'


def test_intervals_are_drawn_below_each_other(root):
  (row,) = part(report(root), 'sweep-differences-0').rows
  assert row == ('a b (n = 2)', pytest.approx(15.0), pytest.approx(12.7062 * 5))


def test_losses_are_means_over_seeds(root):
  line = part(report(root), 'sweep-loss').lines[0]
  assert (line.xs, line.ys) == ((100, 200), (4.5, 3.0))
  assert line.spreads == pytest.approx((0.5 * math.sqrt(2), math.sqrt(2)))


def test_a_trend_has_the_differences_in_the_order_of_its_axis(tmp_path):
  rows_of = [
    Variant('base', {}),
    Variant('far', {}, 'base', ('steps', 'H = 24', 800)),
    Variant('near', {}, 'base', ('steps', 'H = 24', 100)),
  ]
  sweep.write_variants(tmp_path, rows_of)
  for label, loss in (('base', 2.0), ('far', 2.2), ('near', 2.4)):
    sweep.write_into(sweep.folder(tmp_path, label, 0), result(3.0, loss))
  chart = part(report(tmp_path), 'sweep-trend-0')
  assert (chart.x_label, chart.log_x) == ('steps', True)
  (line,) = chart.lines
  assert (line.label, line.xs) == ('H = 24', (100.0, 800.0))
  assert line.ys == pytest.approx((20.0, 10.0))


def test_a_single_place_is_no_trend(tmp_path):
  places = ('steps', 'H = 24', 800)
  rows_of = [Variant('base', {}), Variant('one', {}, 'base', places)]
  sweep.write_variants(tmp_path, rows_of)
  for label, loss in (('base', 2.0), ('one', 2.2)):
    sweep.write_into(sweep.folder(tmp_path, label, 0), result(3.0, loss))
  names = [p.name for p in report(tmp_path).parts]
  assert 'sweep-differences-0' in names
  assert not [name for name in names if name.startswith('sweep-trend')]


def test_the_best_variant_comes_first_and_green_waits_for_all(root):
  found = report(root)
  best, runs = found.tiles
  assert (best.value, best.large) == ('3.000', True)
  assert best.note == 'base'
  assert (runs.value, found.badge.tone) == ('4', 'good')
  (sweep.folder(root, 'a b', 1) / sweep.RESULT).unlink()
  assert report(root).badge.tone == 'wait'


def test_differences_are_at_equal_tokens():
  """Halfway between 4 and 2 the other one is at 3."""
  mine = SeedResult(3.3, 3.3, ((1, 150, 3.3), (2, 200, 2.2)), 3, 1.0, 1.0, 1.0)
  found = sweep_page.gap({0: mine}, {0: result(4.0, 2.0)})
  assert found.tokens == (150, 200)
  assert found.means == pytest.approx((10.0, 10.0))


def test_a_run_without_result_is_named(root):
  (sweep.folder(root, 'a b', 1) / sweep.RESULT).unlink()
  found = report(root)
  assert rows(found)[1]['seeds'] == 1
  assert rows(found)[1]['half of the interval %'] is None
  assert any('no result yet of a b seed 1' in p for p in found.paragraphs)


def test_a_variant_of_which_nothing_is_there_is_named(root):
  sweep.write_variants(root, [Variant('late', {}, 'base')])
  assert any(
    p.endswith('nothing is known of late.') for p in report(root).paragraphs
  )


def test_variants_are_added_to_those_that_are_known(root):
  late = Variant('late', {'seed': 1}, 'base')
  sweep.write_variants(root, [late])
  assert sweep.read_variants(root) == [*ROWS, late]


def test_without_its_list_nothing_is_compared(root):
  (root / sweep.VARIANTS).unlink()
  found = report(root)
  assert [row['variant'] for row in rows(found)] == ['a_b', 'base']
  assert [row['difference %'] for row in rows(found)] == [None, None]
  assert any('sweep.json is missing' in p for p in found.paragraphs)


def test_a_diverged_run_leaves_a_table(root):
  sweep.write_into(sweep.folder(root, 'a b', 1), result(5.0, math.inf))
  found = report(root)
  assert rows(found)[1]['loss'] == math.inf
  labels = [line.label for line in part(found, 'sweep-loss').lines]
  assert labels == ['base']


def test_one_run_of_the_lab_is_a_sweep_of_one(root):
  (row,) = rows(report(sweep.folder(root, 'base', 0)))
  assert (row['variant'], row['seeds'], row['loss']) == ('seed-0', 1, 2.0)


@pytest.mark.parametrize('text', ['{', '{"loss": 1}', '[]'])
def test_a_broken_result_is_named(root, text):
  path = sweep.folder(root, 'base', 0) / sweep.RESULT
  path.write_text(text)
  with pytest.raises(NoReport, match='seed-0'):
    report(root)


def test_two_sweeps_on_one_page(root, tmp_path):
  other = shutil.copytree(root, tmp_path / 'other')
  found = report(root, other)
  assert len(rows(found, 'sweep-0')) == len(rows(found, 'sweep-1')) == 2


def test_a_real_sweep():
  """The sweep's own table says +1.14 ± 1.43 %."""
  found = report(REAL)
  assert found.paragraphs == ()
  _, decoupled, same = rows(found)
  assert decoupled['difference %'] == pytest.approx(1.14, abs=0.005)
  assert decoupled['half of the interval %'] == pytest.approx(1.426, abs=0.001)
  assert (same['against'], same['difference %']) == ('decoupled', 0.0)


def at_steps(*points) -> SeedResult:
  curve = tuple((step, 10 * step, loss) for step, loss in points)
  return SeedResult(points[-1][1], math.nan, curve, 3, 0.5, 0.9, 2.0)


def test_seeds_that_were_evaluated_elsewhere_are_compared_at_equal_tokens():
  """Real runs are evaluated so: one stands between two points of another."""
  mine = at_steps((0, 6.0), (30, 3.0), (60, 2.0))
  other = at_steps((0, 6.0), (20, 4.0), (40, 3.0), (70, 1.5))
  found = sweep_page.mean([mine, other])
  assert found.tokens == (0, 300, 650)
  # At 300 the other is halfway from 4 to 3; the last place has both ends.
  assert found.means == pytest.approx((6.0, (3.0 + 3.5) / 2, (2.0 + 1.5) / 2))


def test_the_ends_of_runs_need_no_common_step():
  """With a beginning and an end alone nothing is interpolated."""
  found = sweep_page.mean(
    [at_steps((0, 6.0), (60, 2.0)), at_steps((0, 5.0), (70, 1.0))]
  )
  assert (found.tokens, found.means) == ((0, 650), (5.5, 1.5))


def test_a_loss_that_no_run_has_is_a_dash(root):
  for label in ('base', 'a b'):
    for seed in (0, 1):
      run = sweep.folder(root, label, seed)
      found = sweep.read_from(run)
      sweep.write_into(run, dataclasses.replace(found, learners_loss=math.nan))
  assert [row["learners' mean"] for row in rows(report(root))] == [None, None]
