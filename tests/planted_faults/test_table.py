# SPDX-License-Identifier: Apache-2.0
"""Each planted fault makes its test fail; the quick part: it can be planted."""

import dataclasses

import pytest

from tests.planted_faults.fault import copy_of_the_tree, problems, run
from tests.planted_faults.table import FAULTS

pytestmark = pytest.mark.beside

BY_NAME = {each.name: each for each in FAULTS}


@pytest.fixture(name='tree', scope='module')
def _tree(tmp_path_factory):
  with copy_of_the_tree(tmp_path_factory.mktemp('planted') / 'tree') as tree:
    yield tree


def test_names_are_unique():
  assert len(BY_NAME) == len(FAULTS)


@pytest.mark.parametrize('name', BY_NAME)
def test_a_fault_can_be_planted(name):
  """The text that it edits is there, once, and so is its test."""
  assert not problems(BY_NAME[name])


def test_a_fault_is_found_for_the_reason_that_the_table_gives(tree):
  planted = BY_NAME['clock without a bound']
  before = (tree / planted.edits[0].path).read_text()
  assert run(planted, tree).found
  for other in ({'says': 'no such words'}, {'edits': ()}):
    assert not run(dataclasses.replace(planted, **other), tree).found
  assert (tree / planted.edits[0].path).read_text() == before


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize('name', BY_NAME)
def test_a_planted_fault_is_found(name, tree):
  outcome = run(BY_NAME[name], tree)
  assert outcome.found, outcome.output
