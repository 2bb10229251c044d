# SPDX-License-Identifier: Apache-2.0
"""Checks what a sweep makes of its runs."""

import dataclasses
import json
import math

import pytest

from diloco.sweeps import sweep
from diloco.sweeps.sweep import SeedResult, Variant


def result(loss: float) -> SeedResult:
  return SeedResult(loss, loss, ((10, 100, loss),), 3, 1.0, 0.9, 2.0)


def test_a_result_of_0_1_0_had_health_which_nobody_reads(tmp_path):
  run = sweep.folder(tmp_path, 'a b', 1)
  sweep.write_into(run, result(1.5))
  path = run / sweep.RESULT
  fields = json.loads(path.read_text()) | {'health': [{'overlap': 0.5}]}
  path.write_text(json.dumps(fields))
  assert sweep.read_from(run) == result(1.5)


@pytest.mark.parametrize(
  ('rows', 'reason'),
  [
    ([('a', {}), ('a', {})], "two variants are called 'a'"),
    ([('a', {}, 'b')], "'a' is compared with 'b', which is none of a"),
  ],
)
def test_variants_that_make_no_sense(rows, reason):
  def make(add):
    for row in rows:
      add(*row)

  with pytest.raises(ValueError, match=reason):
    sweep.variants(make)


def test_differences_are_paired_by_seed():
  rows = [Variant('base', {}), Variant('better', {}, 'base')]
  found = {
    'base': {0: result(2.0), 1: result(4.0), 2: result(1.0)},
    'better': {0: result(1.8), 1: result(3.68)},
  }
  base, better = sweep.compare(found, rows)
  assert (base.mean, base.difference) == (pytest.approx(7 / 3), None)
  assert better.difference == pytest.approx((-0.10 - 0.08) / 2)
  # s = 0.01·√2, n = 2, t = 12.71: half of it is t · s / √2.
  assert better.half_width == pytest.approx(12.7062 * 0.01)


def test_one_seed_has_no_interval():
  many = [0.0, 1.0] * 20  # t of 39 degrees of freedom is 2.0227.
  s = math.sqrt(0.25 * 40 / 39)
  assert sweep.half_width(many) == pytest.approx(
    2.0227 * s / math.sqrt(40), 1e-4
  )
  assert math.isnan(sweep.half_width([0.1]))


def test_a_variant_may_stand_in_several_charts(tmp_path):
  def make(add):
    add('base', {})
    add('one', {}, 'base', at=('M', 'H = 24', 2))
    add('two', {}, 'base', at=[('M', 'H = 24', 4), ('steps', 'M = 4', 10.5)])

  base, one, two = sweep.variants(make)
  assert base.at == ()
  assert one.at == (('M', 'H = 24', 2),)
  assert two.at == (('M', 'H = 24', 4), ('steps', 'M = 4', 10.5))
  sweep.write_variants(tmp_path, [base, one, two])
  assert sweep.read_variants(tmp_path) == [base, one, two]


@pytest.mark.parametrize('older', [None, ['M', 'H = 24', 2]])
def test_a_variant_of_an_older_sweep_stands_in_one_chart_at_most(
  tmp_path, older
):
  fields = {'label': 'a', 'changes': {}, 'against': None, 'at': older}
  (tmp_path / sweep.VARIANTS).write_text(json.dumps([fields]))
  [read] = sweep.read_variants(tmp_path)
  assert read.at == (() if older is None else (('M', 'H = 24', 2),))


def test_merged_tokens_are_unknown_where_a_result_is_older():
  rows = [Variant('base', {})]
  merged = dataclasses.replace(result(2.0), merged_tokens=200)
  [known] = sweep.compare({'base': {0: merged, 1: merged}}, rows)
  [unknown] = sweep.compare({'base': {0: merged, 1: result(2.0)}}, rows)
  assert (known.merged_tokens, unknown.merged_tokens) == (200, None)
