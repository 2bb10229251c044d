# SPDX-License-Identifier: Apache-2.0
"""How the hosts of one learner find each other, and agree where to begin."""

import queue
import threading

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.protocol import host_messages
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.device import Device
from diloco.runtime.hosts import OtherHosts
from diloco.runtime.meeting import Meeting
from diloco.runtime.other_host import OtherHost
from diloco.runtime.part_beginning import begin_part, common_step
from diloco.runtime.world import World
from diloco.transport.group import Connection, GroupLost
from diloco.transport.interface import DataPlane


def gather(
  world: World, met: Meeting, records: LearnerRecords
) -> tuple[OtherHosts, int]:
  """On the leading host: the others, and the step that all go on from.

  `met` is closed once they are connected.

  Raises:
    GroupLost: one of them is gone.
  """
  hosts = OtherHosts(world.listen(), world.hosts - 1)
  met.close()
  step = common_step([records.readable(), *hosts.steps.values()])
  hosts.tell(host_messages.RestoreFrom(step))
  return hosts, step


class Follower:
  """On another host: does what the leading one says, to the end.

  Args:
    world: of the learner.
    met: its hosts; it is closed once this one is connected.
    blueprint: of the run.
    learner: its id.
    device: compiled.
    records: of this host.
    plane: carries the bytes.
  """

  def __init__(
    self,
    world: World,
    met: Meeting,
    blueprint: Blueprint,
    learner: int,
    device: Device,
    records: LearnerRecords,
    plane: DataPlane,
  ):
    self._made = threading.Event()
    self._answer: queue.SimpleQueue = queue.SimpleQueue()
    self._host: OtherHost | None = None
    self._connection = Connection(
      world.connect(),
      host_messages.FROM_LEADING_HOST,
      self._hear,
      self._lost,
      'the leading host',
    )
    met.close()
    self._connection.send(
      host_messages.HostStarted(world.index, records.readable())
    )
    step = self._answer.get()
    if isinstance(step, GroupLost):
      raise step
    beginning = begin_part(blueprint, device, records, step)
    self._host = OtherHost(
      blueprint, learner, device, beginning, records, plane, self._connection
    )
    self._made.set()

  def stop(self, *_):
    """Asks the leading host to end the learner in good order; signal-safe."""
    threading.Thread(
      target=lambda: self._connection.send(host_messages.StopWanted()),
      daemon=True,
    ).start()

  def run(self) -> host_messages.EndAt:
    """To the end.

    Raises:
      GroupLost: the leading host is gone.
    """
    try:
      return self._host.run()
    finally:
      self._host.close()
      self._connection.close(1.0)

  def _hear(self, message):
    if isinstance(message, host_messages.RestoreFrom):
      self._answer.put(message.step)
      return
    self._made.wait()
    self._host.hear(message)

  def _lost(self, error: GroupLost):
    self._answer.put(error)
    self._made.wait()  # Else it would not be heard of by who is being made.
    self._host.lost(error)
