# SPDX-License-Identifier: Apache-2.0
"""Connects the hosts of one learner and agrees on the step they start from."""

import queue
import threading

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.learner.device import Device
from diloco.learner.hosts.host_group import HostGroup
from diloco.learner.hosts.process_group import ProcessGroup, Rendezvous
from diloco.learner.hosts.worker import HostWorker
from diloco.learner.restore import common_step, restore
from diloco.protocol import host_messages
from diloco.run.spec import RunSpec
from diloco.transport.data_plane import DataPlane
from diloco.transport.host_channel import GroupLost, HostConnection


def gather(
  process_group: ProcessGroup, met: Rendezvous | None, records: LearnerRecords
) -> tuple[HostGroup, int | None]:
  """Connects the leading host to the others; returns them and the common step.

  `met` is closed once they are connected. It is None if there are none: then
  there is nothing to agree on, and no step.

  Raises:
    GroupLost: a host is gone.
  """
  if met is None:
    return HostGroup(), None
  hosts = HostGroup(process_group.listen(), process_group.hosts - 1)
  met.close()
  step = common_step([records.readable(), *hosts.steps.values()])
  hosts.tell(host_messages.RestoreFrom(step))
  return hosts, step


class Follower:
  """A host that does not lead: it follows the leading host to the end.

  Args:
    met: open connections to the other hosts; closed once this one is connected.
    device: the compiled device.
    records: checkpoints of this host.
    plane: the data plane.
  """

  def __init__(
    self,
    process_group: ProcessGroup,
    met: Rendezvous,
    run_spec: RunSpec,
    learner: int,
    device: Device,
    records: LearnerRecords,
    plane: DataPlane,
  ):
    self._made = threading.Event()
    self._answer: queue.SimpleQueue = queue.SimpleQueue()
    self._host: HostWorker | None = None
    self._connection = HostConnection(
      process_group.connect(),
      host_messages.FROM_LEADING_HOST,
      self._hear,
      self._lost,
      'the leading host',
    )
    met.close()
    self._connection.send(
      host_messages.HostStarted(process_group.index, records.readable())
    )
    step = self._answer.get()
    if isinstance(step, GroupLost):
      raise step
    restored = restore(run_spec, device, records, step)
    self._host = HostWorker(
      run_spec, learner, device, restored, records, plane, self._connection
    )
    self._made.set()

  def stop(self, *_):
    """Asks the leading host to end the learner in good order; signal-safe."""
    threading.Thread(
      target=lambda: self._connection.send(host_messages.StopWanted()),
      daemon=True,
    ).start()

  def run(self) -> host_messages.EndAt:
    """Follows the leading host's orders to the end.

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
    self._made.wait()  # Otherwise `lost` would find no host to tell.
    self._host.lost(error)
