# SPDX-License-Identifier: Apache-2.0
"""A process that must not train along is refused by name; the run goes on."""

import random

import pytest

from tests.processes.processes import ENDLESS, EXIT_CONFIG, SLOW, Processes

pytestmark = pytest.mark.beside


def _write_text(path, seed: int):
  letters = random.Random(seed).choices(b'the quick brown fox\n', k=1 << 16)
  path.write_bytes(bytes(letters))


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  """Two texts of one length: the run's, and another."""
  folder = tmp_path_factory.mktemp('texts')
  paths = folder / 'ours.txt', folder / 'another.txt'
  for seed, path in enumerate(paths):
    _write_text(path, seed)
  return paths


@pytest.fixture(scope='module')
def running(texts, tmp_path_factory):
  """A syncer and learner 0, which trains; learner 1 has not come yet."""
  with Processes(
    tmp_path_factory.mktemp('refusals'),
    *SLOW,
    *ENDLESS,
    'data.source=text',
    f'data.path={texts[0]}',
  ) as processes:
    syncer, learner = processes.syncer(), processes.learner(0)
    processes.until_merged(0)
    yield processes, syncer, learner


def _refused(running, name: str, *overrides: str) -> str:
  """Starts learner 1 with overrides of its own; returns what it was told.

  Whatever that is, the syncer and learner 0 must go on.
  """
  processes, syncer, learner = running
  refused = processes.learner(1, *overrides, name=name)
  assert processes.exit_code(refused) == EXIT_CONFIG, refused.output
  assert len(refused.errors) == 1, refused.output
  processes.until_merged(0)
  assert (syncer.exit_code, learner.exit_code) == (None, None)
  assert {line['learner'] for line in processes.tape('joined')} == {0}
  return refused.errors[0]


def test_another_config_and_layout_are_refused(running):
  """Issue: each difference is named."""
  told = _refused(
    running, 'another', 'inner.lr=0.011', 'fragments.embedding=own'
  )
  assert 'another inner.lr: 0.011, the run has 0.003' in told
  expected = 'another fragments.embedding: "own", the run has "split"'
  assert expected in told
  assert 'another layout: ' in told


def test_another_text_is_refused(running, texts):
  """Issue: another data fingerprint is refused; the path may differ."""
  told = _refused(running, 'another-text', f'data.path={texts[1]}')
  assert 'another data: ' in told
  assert told.count('another ') == 1
