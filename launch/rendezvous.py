# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a learner of several slices, outside of them all.

  python -m launch.rendezvous --config=… --workdir=… --learner=0 \\
    --bind=host:port --slice_hosts=2

The agents of all hosts of all slices (`launch.agent`) connect to it and wait.
It starts one world after the other: of the slices that `LiveSlices` says, with
JAX's coordination service in a process of its own beside it. A slice whose
process, agent or machine ends is lost; the others go on from memory.

Where no slice has written its boundary, all whose agents are there start again,
a few times in a row. Then, or where the learner has left, agents end with the
exit code that counts, and are started again by what has started them, as any
learner is. The rendezvous ends with 0 or a fatal exit code, once its learner
does. If it dies, so does JAX's service with it, and the learner starts again as
a whole.
"""

import dataclasses
import itertools
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from absl import flags, logging

from diloco.config import flags as config_flags
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import learner_name
from diloco.protocol import slice_messages
from diloco.protocol.slice_messages import (
  AgentHere,
  AgentLeaves,
  AgentReady,
  AskForWorld,
  EndProcess,
  FromRendezvous,
  LearnerOver,
  StartWorld,
)
from diloco.run.bind_policy import check_group, given_access, group_secret
from diloco.run.command import run_command
from diloco.transport import sockets
from diloco.transport.auth import Access
from diloco.transport.host_channel import (
  GroupLost,
  HostConnection,
  HostListener,
)
from launch.coordination import Coordination
from launch.slices import LiveSlices
from launch.supervisor import (
  EXIT_SLICES,
  EXIT_STOPPED,
  EXITS_FATAL,
  LINGER_S,
  POLL_S,
  WORLD_ENDS_S,
  describe_exit,
  has_left,
  severity,
)

# Once a slice is whole, others are waited for so long; then it begins without.
GATHER_S = 120.0
# From the end of an agent, whose process may live on, to that of its world.
AGENT_LOST_S = 60.0
TOGETHER_S = 2.0  # Within which all slices are told to stop, where all are.
# Worlds in a row that end by themselves, with all slices in memory or none.
AGAIN_MAX = 3
CLOSE_S = 10.0
LOST = -signal.SIGKILL  # In place of an exit code, of an agent that is gone.


class Place(NamedTuple):
  """A host of a slice."""

  slice: int
  host: int

  def __str__(self) -> str:
    return f'slice {self.slice}, host {self.host}'


@dataclasses.dataclass
class Agent:
  """An agent that is connected."""

  ready: AgentReady | None = None  # None: its process runs, or is to.
  leaves: bool = False  # Its machine is told to stop.


class Rendezvous:
  """Decides on the worlds of one learner. No clock, process or socket is here.

  Args:
    slices: N.
    hosts: of each slice.
    delay_s: how long a lost slice is away at first.
    serve: returns where JAX's service is for a world of so many hosts.

  Attributes:
    slices: which of them take part.
    world: number of the current world, or of the last.
    over: the exit code with which the learner has ended; None: it has not.
  """

  def __init__(
    self, slices: int, hosts: int, delay_s: float, serve: Callable[[int], str]
  ):
    self.slices = LiveSlices(slices, delay_s)
    self.world = 0
    self.over: int | None = None
    self._hosts = hosts
    self._serve = serve
    self._agents: dict[Place, Agent] = {}
    # Of this world: how each process has ended; None: it runs.
    self._codes: dict[Place, int | None] = {}
    # Slices of which an agent was told to stop; it may be gone by now.
    self._left: set[int] = set()
    self._asked = self._stopped = False
    self._end_at_s = self._leave_at_s = float('inf')
    self._gathers_s: float | None = None  # Since when a slice is whole.
    self._again = 0
    self._messages: list[tuple[Place, FromRendezvous]] = []

  def problem(self, here: AgentHere) -> str:
    """Returns why an agent is none of this learner's; empty: it is."""
    mine, its = (self.slices.count, self._hosts), (here.slices, here.hosts)
    if mine != its:
      return f'{its} slices and hosts of each, there are {mine}'
    if here.slice not in range(mine[0]) or here.host not in range(mine[1]):
      return f'host {here.host} of slice {here.slice}: there is none'
    return ''

  def connected(self, place: Place, here: AgentHere) -> None:
    """Notes an agent; its process may run since before it was cut off."""
    self._agents[place] = Agent()
    if here.world == self.world and self._codes.get(place) == LOST:
      self._codes[place] = None
    elif here.world:
      self._messages.append((place, EndProcess(kill=True)))

  def heard(self, place: Place, message, now_s: float) -> None:
    """Notes what an agent says."""
    agent = self._agents[place]
    match message:
      case AgentReady():
        agent.ready = message
        if message.world == self.world and place in self._codes:
          self._end(place, message.code, now_s)
      case AgentLeaves():
        agent.leaves = True
        self._left.add(place.slice)
        self._leave_at_s = min(self._leave_at_s, now_s + TOGETHER_S)
      case _:
        raise TypeError(f'Not of an agent: {message!r}.')

  def gone(self, place: Place, now_s: float) -> None:
    """Notes that an agent is cut off: its slice is lost."""
    del self._agents[place]
    if place in self._running():
      self._codes[place] = LOST
      self._end_at_s = min(self._end_at_s, now_s + AGENT_LOST_S)
      self._ask()

  def poll(self, now_s: float) -> list[tuple[Place, FromRendezvous]]:
    """Returns messages to agents, in order; each once."""
    if self._codes:
      self._watch(now_s)
      if not self._running():
        self._judge(now_s)
    if not self._codes and self.over is None:
      self._gather(now_s)
    messages, self._messages = self._messages, []
    return [(place, x) for place, x in messages if place in self._agents]

  def _running(self) -> list[Place]:
    return [place for place, code in self._codes.items() if code is None]

  def _places(self, i: int) -> list[Place]:
    return [Place(i, host) for host in range(self._hosts)]

  def _whole(self) -> list[int]:
    """Returns slices of which all hosts wait for a world."""

    def waits(place: Place) -> bool:
      agent = self._agents.get(place)
      return bool(agent and agent.ready and not agent.leaves)

    count = range(self.slices.count)
    return [i for i in count if all(map(waits, self._places(i)))]


  def _tell(self, message: FromRendezvous) -> None:
    self._messages += [(place, message) for place in self._running()]

  def _ask(self) -> None:
    if not self._asked:
      self._asked = True
      self._tell(AskForWorld())

  def _end(self, place: Place, code: int, now_s: float) -> None:
    """Notes the end of a process, and gives the others their time."""
    self._codes[place] = code
    logging.info('world %d: %s: %s', self.world, place, describe_exit(code))
    if not has_left(code):
      self._end_at_s = min(self._end_at_s, now_s + WORLD_ENDS_S)
    else:
      self._end_at_s = min(self._end_at_s, now_s + LINGER_S)
      if code:
        self._stop()

  def _stop(self) -> None:
    if not self._stopped:
      self._stopped = True
      self._tell(EndProcess(kill=False))

  def _watch(self, now_s: float) -> None:
    """Asks for the end of a world, or ends what stays too long."""
    if now_s >= self._leave_at_s:
      self._leave_at_s = float('inf')
      if self._left.issuperset(self.slices.live):
        self._stop()
      else:
        self._ask()
    if self.slices.due(now_s, self._whole()):
      self._ask()
    if now_s >= self._end_at_s:
      self._end_at_s = float('inf')
      self._tell(EndProcess(kill=True))

  def _judge(self, now_s: float) -> None:
    """Decides what follows a world."""
    leaving = self._left
    kept = {
      i: i not in leaving
      and all(self._codes[place] == EXIT_SLICES for place in self._places(i))
      for i in self.slices.live
    }
    worst = max(self._codes.values(), key=severity)
    self._codes = {}
    none = not any(kept.values())
    if none and not (has_left(worst) or worst in EXITS_FATAL):
      # What is in memory of an older world may still be of use.
      kept = {
        i: i not in leaving
        and all(place in self._agents for place in self._places(i))
        for i in self.slices.live
      }
    is_again = none or (all(kept.values()) and not self._asked)
    self._again = self._again + 1 if is_again else 0
    if self._again > AGAIN_MAX:
      kept = dict.fromkeys(kept, False)
    if self.slices.re_forms(kept, True, now_s):
      logging.info('goes on with slices %s', self.slices.live)
      return
    code = worst if worst >= 0 else 128 - worst
    if worst in (0, *EXITS_FATAL):
      self.over = worst
    self._again = 0
    logging.info('world %d has ended with exit code %d', self.world, code)
    for place, agent in self._agents.items():
      agent.ready = None
      self._messages.append((place, LearnerOver(code)))

  def _gather(self, now_s: float) -> None:
    """Starts a world once its slices are there, or as many as are."""
    whole = {*self._whole()}
    here = [i for i in self.slices.live if i in whole]
    if not here:
      self._gathers_s = None
      return
    if self._gathers_s is None:
      self._gathers_s = now_s
    if len(here) < len(self.slices.live):
      if now_s < self._gathers_s + GATHER_S:
        return
      self.slices.ended({i: i in whole for i in self.slices.live}, now_s)
    self._gathers_s = None
    self._begin(here)

  def _begin(self, live: list[int]) -> None:
    places = [place for i in live for place in self._places(i)]
    self.world += 1
    self._asked = self._stopped = False
    self._left = set()
    self._end_at_s = self._leave_at_s = float('inf')
    start = StartWorld(
      self.world,
      tuple(live),
      self._agents[places[0]].ready.coordinator,
      self._serve(len(places)),
      secrets.token_hex(16),
    )
    logging.info('world %d: slices %s', self.world, live)
    for place in places:
      self._codes[place] = None
      self._agents[place].ready = None
      self._messages.append((place, start))


class Server:
  """Connects a rendezvous and its agents."""

  def __init__(self, rendezvous: Rendezvous, listener: HostListener):
    self._rendezvous = rendezvous
    self._listener = listener
    # What was heard of a connection, by its number; the place of each.
    self._heard: queue.SimpleQueue = queue.SimpleQueue()
    self._numbers = itertools.count()
    self._connections: dict[int, HostConnection] = {}
    self._places: dict[int, Place] = {}

  def run(self) -> int:
    """Serves until the learner is over; returns its exit code."""
    while self._rendezvous.over is None:
      self._turn()
    for connection in self._connections.values():
      connection.close(CLOSE_S)
    return self._rendezvous.over

  def _turn(self) -> None:
    now_s = time.monotonic()
    for number, message in self._new():
      if number not in self._connections:
        continue  # It was cut off before.
      if isinstance(message, GroupLost):
        self._cut_off(number, now_s, str(message))
      elif number not in self._places:
        self._greet(number, message, now_s)
      elif isinstance(message, AgentHere):
        self._cut_off(number, now_s, 'is here twice')
      else:
        self._rendezvous.heard(self._places[number], message, now_s)
    numbers = {place: number for number, place in self._places.items()}
    for place, message in self._rendezvous.poll(now_s):
      self._connections[numbers[place]].send(message)

  def _new(self) -> Iterator[tuple[int, object]]:
    """Yields what was heard since the last time; waits a moment for it."""
    while not self._listener.peers.empty():
      number = next(self._numbers)

      def hear(message, number=number):
        self._heard.put((number, message))

      self._connections[number] = HostConnection(
        self._listener.peers.get(),
        slice_messages.FROM_AGENT,
        hear,
        hear,
        f'agent {number}',
      )
    try:
      yield self._heard.get(timeout=POLL_S)
      while True:
        yield self._heard.get_nowait()
    except queue.Empty:
      return

  def _greet(self, number: int, message, now_s: float) -> None:
    problem = 'does not say who it is'
    if isinstance(message, AgentHere):
      problem = self._rendezvous.problem(message)
    if problem:
      self._cut_off(number, now_s, problem)
      return
    place = Place(message.slice, message.host)
    for old in [n for n, other in self._places.items() if other == place]:
      self._cut_off(old, now_s, 'another has come')
    self._places[number] = place
    logging.info('%s is here', place)
    self._rendezvous.connected(place, message)

  def _cut_off(self, number: int, now_s: float, why: str) -> None:
    connection = self._connections.pop(number)
    place = self._places.pop(number, None)
    logging.info('%s: %s', place or 'an agent', why)
    if place is not None:
      self._rendezvous.gone(place, now_s)
    connection.close(POLL_S)


def channel_secret(access: Access, learner: int) -> bytes:
  """Derives the secret of a learner's rendezvous and agents from the token."""
  return group_secret(access, 'rendezvous', learner)


def main(config: RunConfig) -> int:
  """Serves until the learner is over; returns its exit code."""
  learner, bind = flags.FLAGS.learner, flags.FLAGS.bind
  with config_flags.refusing():
    host, port = sockets.split(bind)
    access = given_access(config.transport, bind=None)
    check_group(
      bind,
      config.transport,
      bool(access.token),
      **config_flags.access_vouched(),
      named='bind',
    )
    host = sockets.routable(host)
  try:
    listener = HostListener(host, channel_secret(access, learner), port)
  except OSError as error:
    raise ConfigError(
      [f'--bind={bind}: can not be listened at ({error.strerror})']
    ) from None
  coordination = Coordination(learner_name(learner))
  rendezvous = Rendezvous(
    config.mesh.slices,
    flags.FLAGS.slice_hosts,
    config.run.restart_delay_s,
    lambda hosts: coordination.serve(hosts, host),
  )
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))
  logging.info('the agents of %s meet at %s', learner_name(learner), bind)
  try:
    return Server(rendezvous, listener).run()
  finally:
    coordination.end()


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Folder of the run; it reads none.')
  flags.DEFINE_integer('learner', None, 'Id of its learner.')
  flags.DEFINE_string('bind', None, 'host:port at which agents reach it.')
  flags.DEFINE_integer('slice_hosts', 1, 'Hosts of each slice.')
  run_command(
    main, required=('learner', 'bind'), role='rendezvous', access=True
  )
