# SPDX-License-Identifier: Apache-2.0
"""Queued resources: a gcloud that takes slices away, and one that has none."""

import json
import os
import pathlib
import shlex
import sys

import pytest

from diloco.config.sections import ConfigError
from launch.backends import commands, queued_resources
from launch.backends.commands import CommandFailed
from launch.backends.queued_resources import Cloud
from launch.backends.registry import QueuedResources
from tests.backends.launch_values import (
  a_large_launch,
  a_slice_launch,
  check_golden,
)

pytestmark = pytest.mark.beside

HERE = pathlib.Path(__file__).parent
CLOUD = Cloud('p', 'z')
EXHAUSTED = 'RESOURCE_EXHAUSTED: no more v5e here'


class World:
  """The fake's state, what was said, and a clock that a script moves.

  A turn of the script is what happens while the loop sleeps.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    self.said: list[str] = []
    self.now_s = 0.0
    self.turns = []
    self._write({'instances': {}, 'slices': {}, 'refusals': [], 'outages': []})

  @property
  def backend(self) -> QueuedResources:
    return QueuedResources(
      commands.run, CLOUD, self.said.append, self._sleep, lambda: self.now_s
    )

  def change(self, change) -> None:
    state = self.state
    change(state)
    self._write(state)

  @property
  def state(self) -> dict:
    return json.loads((self._folder / 'state.json').read_text())

  def attempt(self, learner: int) -> str:
    return self.state['slices'][f'first-learner-{learner}']['labels']['attempt']

  def calls(self, verb: str) -> list[list[str]]:
    lines = (self._folder / 'calls.jsonl').read_text().splitlines()
    called = [json.loads(line) for line in lines]
    return [call for call in called if verb in call]

  def _sleep(self, seconds: float) -> None:
    self.now_s += seconds
    assert self.turns, f'the loop goes on for too long: {self.said}'
    self.change(self.turns.pop(0))

  def _write(self, state: dict) -> None:
    (self._folder / 'state.json').write_text(json.dumps(state))


@pytest.fixture
def world(tmp_path, monkeypatch):
  gcloud = tmp_path / 'gcloud'
  gcloud.write_text(
    f'#!/bin/sh\nexec {sys.executable} -I -S {HERE / "fake_gcloud.py"} "$@"\n'
  )
  gcloud.chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  monkeypatch.setenv('FAKES', str(tmp_path))
  return World(tmp_path)


def _becomes(learner, state):
  def change(whole):
    whole['slices'][f'first-learner-{learner}']['state'] = state

  return change


def _disappears(learner):
  return lambda whole: whole['slices'].pop(f'first-learner-{learner}')


def _all(*changes):
  def change(whole):
    for each in changes:
      each(whole)

  return change


def _nothing(whole):
  pass


def _run_ends(code=0):
  def change(whole):
    whole['instances']['first-syncer']['exit'] = code

  return change


def test_a_run_without_a_fault(world):
  world.turns = [
    _all(_becomes(0, 'ACTIVE'), _becomes(1, 'ACTIVE')),
    _run_ends(),
  ]
  assert world.backend.start(a_slice_launch()) == 0
  slices = world.state['slices']
  assert {each['state'] for each in slices.values()} == {'DELETING'}
  assert len(world.calls('create')) == 3


@pytest.mark.parametrize('gone', ['SUSPENDED', 'FAILED'])
def test_a_slice_that_is_gone_is_asked_for_again(world, gone):
  world.turns = [
    _all(_becomes(0, 'ACTIVE'), _becomes(1, 'ACTIVE')),
    _becomes(1, gone),
    _nothing,  # It is being deleted.
    _disappears(1),
    _becomes(1, 'ACTIVE'),
    _run_ends(),
  ]
  assert world.backend.start(a_slice_launch()) == 0
  assert (world.attempt(0), world.attempt(1)) == ('1', '2')
  script = world.state['slices']['first-learner-1']['script']
  assert '--learner=1 ' in script
  assert 'first-learner-1, attempt 2' in script


def test_it_waits_longer_each_time_that_there_is_none(world):
  world.change(lambda state: state['refusals'].extend([EXHAUSTED] * 3))
  world.turns = [_nothing] * 8 + [_run_ends()]
  assert world.backend.start(a_slice_launch(learners=1)) == 0
  again = [line for line in world.said if 'again in' in line]
  assert again == [
    f'learner-0: again in {wait_s} s' for wait_s in (60, 120, 240)
  ]
  assert 'learner-0: asked for, attempt 1' in world.said


def test_it_does_not_wait_for_what_will_never_be(world):
  world.change(lambda state: state['refusals'].append('PERMISSION_DENIED: no'))
  with pytest.raises(CommandFailed, match='PERMISSION_DENIED: no'):
    world.backend.start(a_slice_launch())


def test_what_passes_does_not_end_the_watch(world):
  def fails(state):
    state['outages'] = ['UNAVAILABLE: 503 Service Unavailable'] * 2

  world.turns = [fails, _nothing, _run_ends()]
  assert world.backend.start(a_slice_launch()) == 0
  assert sum('Service Unavailable' in line for line in world.said) == 2


def test_one_that_somebody_else_has_made_meanwhile(world):
  world.change(lambda state: state['refusals'].append('ALREADY_EXISTS: it'))
  world.turns = [_nothing, _run_ends()]
  assert world.backend.start(a_slice_launch(learners=1)) == 0
  assert len(world.calls('create')) == 2


def test_one_that_never_comes_up_is_not_asked_for_at_once(world):
  world.turns = [
    _becomes(0, 'FAILED'),
    _disappears(0),
    _becomes(0, 'FAILED'),
    _disappears(0),
    _nothing,
    _becomes(0, 'ACTIVE'),
    _run_ends(),
  ]
  assert world.backend.start(a_slice_launch(learners=1)) == 0
  assert world.attempt(0) == '3'


def test_what_somebody_deleted_is_not_missed(world):
  world.turns = [
    _all(_becomes(0, 'ACTIVE'), _becomes(1, 'ACTIVE')),
    _disappears(1),
    _nothing,
    _run_ends(),
  ]
  assert world.backend.start(a_slice_launch()) == 0
  assert list(world.state['slices']) == ['first-learner-0']


def test_who_watches_brings_back_what_another_has_started(world):
  whole = a_slice_launch(at_first=1)
  world.turns = [_nothing, _run_ends()]
  assert world.backend.start(whole) == 0
  world.change(lambda state: state['slices'].clear())
  world.change(_run_ends(None))
  world.backend.add(whole, 1)
  world.turns = [
    _becomes(1, 'SUSPENDED'),
    _disappears(1),
    _nothing,
    _run_ends(),
  ]
  assert world.backend.watch(whole) == 0
  assert list(world.state['slices']) == ['first-learner-1']
  assert world.attempt(1) == '2'


def test_the_same_command_again_goes_on(world):
  world.turns = [_nothing, _run_ends(1)]
  assert world.backend.start(a_slice_launch()) == 1
  world.change(_run_ends(None))
  world.turns = [_run_ends()]
  world.backend.start(a_slice_launch())
  assert len(world.calls('create')) == 3


def test_the_end_of_the_syncer_is_the_end(world):
  world.turns = [_run_ends(78)]
  assert world.backend.start(a_slice_launch()) == 78


def test_one_learner_is_added_and_removed(world):
  whole = a_slice_launch(learners=3, at_first=1)
  world.turns = [_run_ends()]
  world.backend.start(whole)
  world.backend.add(whole, 2)
  assert (
    '--syncer=10.0.0.1:7777'
    in (world.state['slices']['first-learner-2']['script'])
  )
  world.backend.remove(whole, 2)
  assert world.state['slices']['first-learner-2']['state'] == 'DELETING'


def test_nothing_is_added_to_a_run_that_is_not_there(world):
  with pytest.raises(ConfigError, match='no such machine'):
    world.backend.add(a_slice_launch(), 1)


def test_a_neighbour_with_a_similar_name_is_left_alone():
  names = ('first-learner-0', 'second-first-learner-0', 'first-learner-16')
  listed = json.dumps(
    [{'name': f'p/{name}', 'state': {'state': 'ACTIVE'}} for name in names]
  )
  (found,) = queued_resources.slices(a_slice_launch(), listed)
  assert (found.learner, found.attempt) == (0, 1)


@pytest.mark.parametrize('accelerator', ['v5litepod-8', 'v5litepod-16'])
@pytest.mark.parametrize('capacity', ['spot', 'on_demand', 'reservation'])
def test_what_is_asked_for(accelerator, capacity, request):
  reservation = 'ours' if capacity == 'reservation' else ''
  whole = a_slice_launch(
    accelerator=accelerator, capacity=capacity, reservation=reservation
  )
  role = whole.learners[1]
  cloud = Cloud('p', 'z', 'me@p', 'net', True)
  text = shlex.join(
    queued_resources.create_learner(whole, role, cloud, 'x.sh', 3)
  )
  check_golden(
    f'gcloud-{accelerator}-{capacity}.txt',
    text.replace(' --', ' \\\n  --') + '\n',
    request.config.getoption('--rewrite'),
  )


def test_each_shard_of_the_syncer_has_a_machine(world):
  world.turns = [_run_ends()]
  world.backend.start(
    a_large_launch('v5e-32', shards=2, workdir='/workdir', image='a:1')
  )
  made = [call for call in world.calls('create') if 'instances' in call]
  assert [call[3] for call in made] == ['first-syncer', 'first-shard-1']
  assert '--labels=run=first,role=shard' in made[1]
  script = world.state['instances']['first-shard-1']['script']
  assert '"--lead=10.0.0.1:7777"' in script
  assert 'iptables' in script and '--privileged' not in script
