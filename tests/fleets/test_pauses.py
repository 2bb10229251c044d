# SPDX-License-Identifier: Apache-2.0
"""What was measured of a learner that re-forms: its file, and its words."""

import dataclasses
import json

import pytest

from diloco.fleets import pauses
from diloco.fleets.pauses import MeasuredPause

ENTRY = MeasuredPause(
  params=1e7,
  slices=3,
  hosts=1,
  how='standby',
  shrink_s=0.5,
  regrow_s=1.5,
  machine='CPU',
  date='2026-11-28',
  commit='0223e0a4',
)


def test_the_file_of_the_package_can_be_read():
  assert all(isinstance(each, MeasuredPause) for each in pauses.measured())


def test_an_entry_replaces_the_one_of_the_same_setup(tmp_path):
  path = tmp_path / pauses.FILE
  cold = dataclasses.replace(ENTRY, how='cold', shrink_s=9.0)
  again = dataclasses.replace(ENTRY, shrink_s=0.7, date='2026-12-01')
  for entry in (ENTRY, cold, again):
    pauses.write_pause(entry, path)
  assert pauses.read(path) == (cold, again)
  assert pauses.read(tmp_path / 'none') == ()


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'slices': 1}, 'slices=1: must be a whole number, at least 2'),
    ({'hosts': 1.5}, 'hosts=1.5: must be a whole number, at least 1'),
    ({'how': 'warm'}, "how='warm': must be one of standby, cold"),
    ({'regrow_s': float('nan')}, 'regrow_s=nan: must be a finite number'),
    ({'machine': ''}, "machine='': must be a text"),
  ],
)
def test_what_makes_no_sense_is_refused_and_named(changes, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(ENTRY, **changes)
  path = tmp_path / pauses.FILE
  path.write_text(json.dumps([dataclasses.asdict(ENTRY) | changes]))
  with pytest.raises(ValueError, match=rf'{pauses.FILE}: entry 0: {words}'):
    pauses.write_pause(ENTRY, path)


def test_a_field_that_is_missing_is_named(tmp_path):
  path = tmp_path / pauses.FILE
  path.write_text('[{"params": 1e7}]')
  with pytest.raises(ValueError, match='entry 0: must have params, slices'):
    pauses.read(path)


def test_a_pause_says_where_it_is_from(monkeypatch):
  monkeypatch.setattr(pauses, 'measured', lambda: (ENTRY,))
  assert ENTRY.pause_s == 1.0
  assert pauses.in_words(13.7) == "the paper's fitted 13.7 s"
  assert pauses.in_words(1.0) == (
    '1 s (measured here: 10 M, 3 slices of 1 host, CPU, standby)'
  )
  assert pauses.in_words(20.0) == '20 s (as given)'


def test_the_nearest_model_of_each_way():
  large = dataclasses.replace(ENTRY, params=1e9)
  cold = dataclasses.replace(ENTRY, how='cold')
  among = (cold, ENTRY, large)
  assert pauses.nearest(2e7, among) == (ENTRY, cold)
  assert pauses.nearest(5e9, among) == (large, cold)
  assert pauses.nearest(1.0, ()) == ()
