# SPDX-License-Identifier: Apache-2.0
"""Learners die without a word, and come back through a peer, bit for bit."""

import collections
import dataclasses
import threading

import jax
import numpy as np
import pytest

from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import learner_name
from diloco.protocol import messages
from diloco.protocol.syncer import events as syncer_events
from tests.in_process.in_process import Living, Run
from tests.transport.faulty import Faults

pytestmark = pytest.mark.beside

FLOOR_S = 0.02
NEWCOMER = 2  # An id that the run has not seen.
LAST = 3  # Another.


class Watched:
  """Programs that note what is trained on, and what is donated.

  Args:
    programs: do the work.
  """

  def __init__(self, programs):
    self._programs = programs
    self.batches: list[int] = []  # First rows, in order.
    self.held: list = []  # Inner states that were held, to be donated too.
    self.first = None  # The inner state of the first step.
    self.draws = 0  # Of the initial Θ.

  def __getattr__(self, name):
    return getattr(self._programs, name)

  def draw(self, zeros):
    self.draws += 1
    return self._programs.draw(zeros)

  def step(self, params, state, batch, lr, key):
    self._note(state, key)
    return self._programs.step(params, state, batch, lr, key)

  def step_double_buffered(self, params, state, batch, lr, key, spare):
    """Makes the step after a donation or a checkpoint."""
    self._note(state, key)
    self.held.append(_bits(state))
    return self._programs.step_double_buffered(
      params, state, batch, lr, key, spare
    )

  def _note(self, state, key):
    if not self.batches:
      self.first = _bits(state)
    self.batches.append(key[1])


class DyingDonor:
  """The plane of a newcomer whose donor dies after the first payload.

  Args:
    plane: does the work.
    die: kills the donor.
  """

  def __init__(self, plane, die):
    self._plane = plane
    self._die = die
    self.died = threading.Event()

  def __getattr__(self, name):
    return getattr(self._plane, name)

  def fetcher(self, address: str):
    fetcher = self._plane.fetcher(address)
    if '://newcomer' not in address or self.died.is_set():
      return fetcher
    return _DyingFetcher(fetcher, self)

  def kill_donor(self):
    self._die()
    self.died.set()


class _DyingFetcher:
  def __init__(self, fetcher, plane: DyingDonor):
    self._fetcher = fetcher
    self._plane = plane
    self._pulls = 0

  def pull(self, payload, timeout_s):
    self._pulls += 1
    if self._pulls == 2:
      self._plane.kill_donor()
    return self._fetcher.pull(payload, timeout_s)

  def close(self):
    self._fetcher.close()


def _bits(tree) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@dataclasses.dataclass
class Story:
  """A run in which learners die; each part is told at `story`."""

  run: Run
  watched: dict[str, Watched]
  reported: dict[int, int]  # By process: rows, as last reported.
  processes: dict[str, int]
  died: dict[str, bool]

  def begin(self, name: str) -> dict:
    """The line of a process's first step."""
    [line] = [
      line
      for path in self.run.workdir.tapes.iterdir()
      for line in read_jsonl(path)
      if line['kind'] == 'Begin' and line['process'] == self.processes[name]
    ]
    return line


@pytest.fixture(scope='module')
def story(tmp_path_factory):
  run = Run(
    tmp_path_factory.mktemp('bootstrap'),
    Faults(),
    step_floor_s=FLOOR_S,
    checkpoint={'learner_every_steps': 10},
    total_steps=1_000_000,
  )
  told = Story(run, {}, {}, {}, {})
  _note_reports(run, told)

  def start(name: str, learner: int, plane=None) -> Living:
    told.watched[name] = Watched(run.programs)
    living = run.start(learner, plane, told.watched[name])
    told.processes[name] = living.exchange.process
    return living

  def end(living: Living):
    living.kill()
    living.thread.join()
    run.until(
      lambda: all(
        (living.learner, living.exchange.incarnation) != key
        for key in list(run.syncing._peers)
      ),
      f'learner {living.learner} is gone',
    )

  try:
    run.start_syncer()
    donor, dies = start('donor', 0), start('dies', 1)
    run.until_merged(donor)
    run.until_merged(dies)

    # It comes back through its peer.
    end(dies)
    again = start('again', 1)
    run.until_merged(again)

    saved = run.workdir.checkpoints(learner_name(donor.learner))
    run.until(
      lambda: any(path.name.isdecimal() for path in saved.glob('*')),
      'the donor has a checkpoint',
    )

    # An unknown learner joins; the donor that is asked first dies.
    plane = DyingDonor(run.plane(7), donor.kill)
    joins = start('joins', NEWCOMER, plane)
    run.until_merged(joins)
    told.died['joins'] = plane.died.is_set()

    # The only donor dies: it has a checkpoint of its own.
    end(again)
    plane = DyingDonor(run.plane(8), joins.kill)
    alone = start('alone', 0, plane)
    run.until_merged(alone)
    told.died['alone'] = plane.died.is_set()

    # No peer is there, and nothing on its disk.
    end(alone)
    last = start('last', LAST)
    run.until_merged(last)
  finally:
    run.close()
  return told


def _note_reports(run: Run, told: Story):
  note_event = run.syncing._stats.note_event

  def note(event):
    note_event(event)
    match event:
      case syncer_events.Heard(message=messages.Report()):
        process = event.incarnation >> 12
        told.reported[process] = event.message.rows

  run.syncing._stats.note_event = note


def test_it_goes_on_with_the_donors_moments_bit_for_bit(story):
  donated = story.watched['again'].first
  assert donated in story.watched['donor'].held
  assert any(any(leaf) for leaf in donated), 'all zeros'


def test_only_those_draw_that_begin_the_run(story):
  """Not those that take a peer's state, a checkpoint or the syncer's Θ."""
  draws = {name: each.draws for name, each in story.watched.items()}
  assert draws.pop('donor') == 1
  assert draws.pop('dies') <= 1  # A round may have closed before it came.
  assert not any(draws.values()), draws


def test_its_source_is_on_the_tape(story):
  source = story.begin('again')['source']
  assert (source['kind'], source['learner']) == ('peer', 0)
  assert source['process'] == story.processes['donor']


def test_no_batch_is_trained_on_twice_and_none_left_out(story):
  """Batches that were never reported are the exception."""
  first, again = story.watched['dies'], story.watched['again']
  rows = story.reported[story.processes['dies']]
  assert again.batches[0] == rows == story.begin('again')['rows']
  before = [row for row in first.batches if row < rows]
  counted = collections.Counter([*before, *again.batches])
  batch = story.run.run_spec.config.data.batch
  assert sorted(counted) == list(range(0, batch * len(counted), batch))
  assert set(counted.values()) == {1}


def test_a_donor_that_dies_half_way_is_replaced_by_another(story):
  assert story.died['joins']
  source = story.begin('joins')['source']
  assert (source['kind'], source['learner']) == ('peer', 1)
  assert story.watched['joins'].first in story.watched['again'].held


def test_an_id_that_the_run_has_not_seen_begins_its_shard(story):
  assert story.begin('joins')['rows'] == 0
  assert story.watched['joins'].batches[0] == 0


def test_without_a_donor_left_it_goes_on_from_its_own_checkpoint(story):
  assert story.died['alone']
  begin = story.begin('alone')
  assert begin['source']['kind'] == 'checkpoint'
  assert begin['source']['process'] == story.processes['donor']
  assert begin['step'] == begin['source']['step'] > 0
  # Killed right after it had saved, it may not have come to report that step.
  reported = story.reported[story.processes['donor']]
  batch = story.run.run_spec.config.data.batch
  assert begin['rows'] == max(reported, begin['source']['step'] * batch)


def test_without_a_checkpoint_either_the_syncer_gives_it_all(story):
  begin = story.begin('last')
  assert begin['source']['kind'] == 'seed'
  lines = read_jsonl(story.run.workdir.learner_tape(LAST))
  before = [line for line in lines if line['kind'] in ('Apply', 'Begin')]
  kinds = [line['kind'] for line in before]
  fragments = story.run.run_spec.config.protocol.fragments
  assert kinds[: fragments + 1] == ['Apply'] * fragments + ['Begin']
  assert all(line['version'] > 0 for line in before[:fragments])
