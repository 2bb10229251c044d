# SPDX-License-Identifier: Apache-2.0
"""A rendezvous begins worlds, and decides what follows them; time is an
argument. Then it and agents by their sockets, with a stand-in for the learner.
"""

import pathlib
import shutil
import signal
import sys
import threading

import pytest

from diloco.config.sections import ConfigError
from diloco.metrics.workdir import Workdir
from diloco.protocol.slice_messages import (
  AgentHere,
  AgentLeaves,
  AgentReady,
  AskForWorld,
  EndProcess,
  LearnerOver,
  StartWorld,
)
from diloco.transport.host_channel import HostListener
from launch import agent
from launch.agent import Agent, learner_flags
from launch.program import Role
from launch.rendezvous import (
  AGAIN_MAX,
  AGENT_LOST_S,
  GATHER_S,
  TOGETHER_S,
  Place,
  Rendezvous,
  Server,
)
from launch.supervisor import EXIT_SLICES, EXIT_STOPPED, WORLD_ENDS_S
from tests.waiting import until

SLICES, HOSTS, DELAY_S = 3, 2, 10.0
PLACES = [Place(i, k) for i in range(SLICES) for k in range(HOSTS)]
SECRET = b'of this run'


def of(*slices: int) -> list[Place]:
  return [place for place in PLACES if place.slice in slices]


class Learner:
  """A rendezvous, and what its agents say to it."""

  def __init__(self):
    self.it = Rendezvous(SLICES, HOSTS, DELAY_S, lambda hosts: f'jax:{hosts}')
    self.now_s = 0.0

  def comes(self, *places: Place, world: int = 0, code: int = 0):
    for place in places:
      self.it.connected(place, AgentHere(*place, SLICES, HOSTS, 0))
    self.ends(*places, world=world, code=code)

  def ends(self, *places: Place, code: int, world: int | None = None):
    for place in places:
      number = self.it.world if world is None else world
      message = AgentReady(f'host-{place}', number, code)
      self.it.heard(place, message, self.now_s)

  def told(self, after_s: float = 0.0) -> dict[object, list[Place]]:
    """Returns the places that get each message, some time later."""
    self.now_s += after_s
    found = {}
    for place, message in self.it.poll(self.now_s):
      if isinstance(message, StartWorld):  # Its secret is random.
        message = message.slices
      found.setdefault(message, []).append(place)
    return found

  def trains(self) -> 'Learner':
    self.comes(*PLACES)
    assert self.told() == {(0, 1, 2): PLACES}
    return self


def test_a_world_begins_once_all_hosts_are_there():
  learner = Learner()
  learner.comes(*PLACES[:-1])
  assert learner.told(GATHER_S - 1) == {}
  learner.comes(PLACES[-1])
  messages = [message for _, message in learner.it.poll(learner.now_s)]
  assert len(messages) == len(PLACES) and len({*messages}) == 1
  start = messages[0]
  assert (start.world, start.slices) == (1, (0, 1, 2))
  assert (start.coordinator, start.service) == (
    f'host-{PLACES[0]}', f'jax:{len(PLACES)}',
  )  # fmt: skip


def test_a_slice_that_does_not_come_is_not_waited_for():
  learner = Learner()
  assert learner.told(GATHER_S) == {}
  learner.comes(*of(0, 2), Place(1, 0))
  assert learner.told() == {}
  assert learner.told(GATHER_S) == {(0, 2): of(0, 2)}
  assert learner.told(DELAY_S) == {}  # It is not there to be asked back.
  learner.comes(Place(1, 1))
  assert learner.told() == {AskForWorld(): of(0, 2)}
  learner.ends(*of(0, 2), code=EXIT_SLICES)
  assert learner.told() == {(0, 1, 2): PLACES}


def test_a_lost_slice_is_taken_back():
  learner = Learner().trains()
  for place in of(1):
    learner.it.gone(place, learner.now_s)
  assert learner.told() == {AskForWorld(): of(0, 2)}
  learner.ends(*of(0, 2), code=EXIT_SLICES)
  assert learner.told() == {(0, 2): of(0, 2)}
  learner.comes(*of(1))
  assert learner.told(DELAY_S - 1) == {}
  assert learner.told(1) == {AskForWorld(): of(0, 2)}
  learner.ends(*of(0, 2), code=EXIT_SLICES)
  assert learner.told() == {(0, 1, 2): PLACES}


def test_a_slice_that_was_told_to_stop_is_lost_though_its_agents_are_gone():
  learner = Learner().trains()
  for place in of(0):
    learner.it.heard(place, AgentLeaves(), learner.now_s)
  assert learner.told(TOGETHER_S) == {AskForWorld(): PLACES}
  learner.ends(*PLACES, code=EXIT_SLICES)
  for place in of(0):  # Before what has ended is judged.
    learner.it.gone(place, learner.now_s)
  assert learner.told() == {(1, 2): of(1, 2)}


def test_what_stays_after_a_death_is_ended():
  learner = Learner().trains()
  learner.ends(Place(1, 0), code=-signal.SIGSEGV)
  learner.ends(Place(0, 0), code=EXIT_SLICES)
  assert learner.told(WORLD_ENDS_S - 1) == {}
  stayed = [Place(0, 1), Place(1, 1), *of(2)]
  assert learner.told(1) == {EndProcess(kill=True): stayed}
  learner.ends(*stayed[:2], code=-signal.SIGKILL)
  learner.ends(*stayed[2:], code=EXIT_SLICES)
  assert learner.told() == {(2,): of(2)}


def test_an_agent_that_was_cut_off_for_a_moment_loses_nothing():
  learner = Learner().trains()
  place = Place(2, 1)
  learner.it.gone(place, learner.now_s)
  assert learner.told() == {AskForWorld(): [p for p in PLACES if p != place]}
  learner.it.connected(place, AgentHere(*place, SLICES, HOSTS, 1))
  assert learner.told(AGENT_LOST_S - 1) == {}
  learner.ends(*PLACES, code=EXIT_SLICES)
  assert learner.told() == {(0, 1, 2): PLACES}


def test_a_process_of_another_world_is_ended():
  learner = Learner()
  learner.it.connected(Place(0, 0), AgentHere(0, 0, SLICES, HOSTS, 7))
  assert learner.told() == {EndProcess(kill=True): [Place(0, 0)]}


@pytest.mark.parametrize('code', [0, 64, 69, 78, EXIT_STOPPED])
def test_where_the_learner_has_left_its_agents_end_as_it_did(code):
  learner = Learner().trains()
  learner.ends(PLACES[0], code=code)
  is_stopped = code == EXIT_STOPPED
  stops = {EndProcess(kill=False): PLACES[1:]} if is_stopped else {}
  assert learner.told() == stops
  learner.ends(*PLACES[1:], code=code)
  assert learner.told() == {LearnerOver(code): PLACES}
  assert learner.it.over == (None if is_stopped else code)


def test_a_slice_that_is_told_to_stop_leaves_at_a_boundary():
  learner = Learner().trains()
  learner.it.heard(Place(0, 1), AgentLeaves(), learner.now_s)
  assert learner.told() == {}
  assert learner.told(TOGETHER_S) == {AskForWorld(): PLACES}
  learner.ends(*PLACES, code=EXIT_SLICES)
  assert learner.told() == {(1, 2): of(1, 2)}


def test_where_all_are_told_to_stop_the_learner_leaves_in_order():
  learner = Learner().trains()
  for i in range(SLICES):
    learner.it.heard(Place(i, 0), AgentLeaves(), learner.now_s)
  assert learner.told(TOGETHER_S) == {EndProcess(kill=False): PLACES}


@pytest.mark.parametrize(
  ('code', 'told'), [(EXIT_SLICES, EXIT_SLICES), (1, 1), (-9, 137)]
)
def test_worlds_that_end_by_themselves_again_and_again(code, told):
  learner = Learner().trains()
  for _ in range(AGAIN_MAX):
    learner.ends(*PLACES, code=code)
    assert learner.told() == {(0, 1, 2): PLACES}
  learner.ends(*PLACES, code=code)
  assert learner.told() == {LearnerOver(told): PLACES}
  assert learner.it.over is None
  for place in PLACES:
    learner.it.gone(place, learner.now_s)
  learner.trains()


def test_a_machine_that_is_lost_while_a_world_begins():
  """Boundaries in memory of an older world are not given up."""
  learner = Learner().trains()
  for place in of(1):
    learner.it.gone(place, learner.now_s)
  learner.told()
  learner.ends(*of(0, 2), code=1)  # They had no boundary yet.
  assert learner.told() == {(0, 2): of(0, 2)}


def test_an_agent_of_another_learner_is_refused():
  it = Learner().it
  assert it.problem(AgentHere(2, 1, SLICES, HOSTS, 0)) == ''
  assert 'there are (3, 2)' in it.problem(AgentHere(0, 0, 2, HOSTS, 0))
  assert 'host 2 of slice 0' in it.problem(AgentHere(0, 2, SLICES, HOSTS, 0))


def test_an_agent_passes_on_what_is_the_learners():
  words = ['--slice=1', '--learner=0', '--slice_hosts=2', '--slices=3']
  assert learner_flags([*words, '--megascale']) == ['--learner=0', '--slices=3']


def test_a_folder_in_memory_is_of_one_user_and_host(tmp_path, monkeypatch):
  monkeypatch.setattr(agent, 'SHARED_MEMORY', str(tmp_path))
  path = agent.memory_folder('host 0')
  (path / 'slice-0').touch()
  assert agent.memory_folder('host 0') == path
  assert agent.memory_folder('host 1') != path
  assert path.stat().st_mode & 0o777 == 0o700
  shutil.rmtree(path)
  path.symlink_to(tmp_path)
  with pytest.raises(ConfigError, match='is not a folder of this user'):
    agent.memory_folder('host 0')


# Each process of the stand-in waits for the file of its agent, or for SIGTERM.
STAND_IN = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
flags = dict(word[2:].partition('=')[::2] for word in sys.argv[2:])
live = flags['live_slices'].split(',')
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with (folder / live[int(flags.get('host', 0))]).open('a') as file:
  file.write(flags['live_slices'] + chr(10))
while not (pathlib.Path(flags['memory']) / 'wanted').exists():
  if (folder / 'over').exists():
    sys.exit(0)
  time.sleep(0.01)
sys.exit(75)
"""


def test_agents_and_a_rendezvous_by_their_sockets(tmp_path: pathlib.Path):
  """One of two is told to stop, and the other goes on to the end."""
  listener = HostListener('127.0.0.1', SECRET)
  rendezvous = Rendezvous(2, 1, 0.0, lambda hosts: '127.0.0.1:1')
  codes, agents = {}, {}

  def run(name, work):
    thread = threading.Thread(
      target=lambda: codes.setdefault(name, work()), daemon=True
    )
    thread.start()
    return thread

  threads = [run('rendezvous', Server(rendezvous, listener).run)]
  stand_in = (sys.executable, '-IS', '-c', STAND_IN, str(tmp_path))
  for i in range(2):
    (tmp_path / f'memory-{i}').mkdir()
    agents[i] = Agent(
      Role('learner-0', stand_in, hosts=2, slices=2),
      Place(i, 0),
      '127.0.0.1',
      tmp_path / f'memory-{i}',
      Workdir(tmp_path),
    )
    work = agents[i].run
    threads.append(run(i, lambda work=work: work(listener.address, SECRET)))

  def worlds(i: int) -> list[str]:
    path = tmp_path / str(i)
    return path.read_text().split() if path.exists() else []

  until(lambda: worlds(0) == worlds(1) == ['0,1'], 60, 'both take part')
  agents[0].stop()
  until(lambda: worlds(1) == ['0,1', '1'], 60, 'one goes on')
  until(lambda: codes.get(0) == EXIT_STOPPED, 60, 'the other has left')
  (tmp_path / 'over').touch()
  for thread in threads:
    thread.join(60)
  listener.close()
  assert codes == {0: EXIT_STOPPED, 1: 0, 'rendezvous': 0}
  assert worlds(0) == ['0,1']
  assert not [*tmp_path.glob('memory-*')]
