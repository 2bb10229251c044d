# SPDX-License-Identifier: Apache-2.0
"""The process of a shard that does not lead: it executes the leader's orders.

It outlives its leader: it waits for the leader's next process and reports what
it holds. Work in progress for the one before is void.
"""

import queue
import threading
import time

from absl import logging

from diloco.metrics import names
from diloco.metrics.workdir import Workdir
from diloco.metrics.writer import Writer
from diloco.protocol import messages
from diloco.protocol import shard_messages as orders
from diloco.run.spec import RunSpec
from diloco.syncer.shard import Shard
from diloco.syncer.storage import ShardDisk
from diloco.transport.auth import Access
from diloco.transport.control_client import (
  ConnectFailed,
  ControlClient,
  NotAdmitted,
)
from diloco.transport.data_plane import DataPlane
from diloco.transport.sockets import HostUnknown

ATTEMPT_S = 2.0  # For one attempt to connect.
RETRY_S = 0.2  # Between two attempts.
ALIVE_EVERY_S = 1.0  # Interval of `Alive` messages when nothing else is sent.


class ShardRefused(Exception):
  """The leader refuses this process, and would refuse any other."""


class ShardServer:
  """One shard, from its start to the end of the run.

  Args:
    shard: number of the shard, not 0.
    leader: host:port of the leader.
    writer: takes its scalars, each time that it hears from the leader.

  Raises:
    BrokenRecord: the folder belongs to another run.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    shard: int,
    leader: str,
    plane: DataPlane,
    workdir: Workdir,
    access: Access,
    writer: Writer,
  ):
    self._address = leader
    self._writer = writer
    self._access = access
    self._workdir = workdir
    self._connect_s = run_spec.config.transport.connect_s
    self._process = time.time_ns() // 1_000_000
    self._items: queue.SimpleQueue = queue.SimpleQueue()
    self._client: ControlClient | None = None
    self._stopped = threading.Event()
    self._shard = Shard(
      run_spec,
      plane,
      shard,
      answer=self._say,
      crash=lambda error: self._items.put((None, error)),
    )
    self._disk = ShardDisk(run_spec, workdir, shard, self._shard.model)

  def stop(self, *_):
    """Leaves before the run is over; also serves as a signal handler."""
    self._stopped.set()

  def run(self) -> bool:
    """Serves until the run is over; returns False if it was stopped before.

    Raises:
      ConnectFailed: there was no leader in time, at the start.
      ShardRefused: the leader refuses this process.
    """
    give_up_s = time.monotonic() + self._connect_s
    while not self._stopped.is_set():
      client = self._connect(give_up_s)
      if client is None:
        if self._workdir.summary.exists():
          return True
        continue
      give_up_s = None  # There was a leader, so there will be another.
      if self._serve(client):
        return True
    self._disk.save(self._shard.closed_round, wait=True)
    return False

  def close(self):
    """Ends sessions and threads."""
    if self._client is not None:
      self._client.close()
    self._shard.close()
    self._disk.close()

  def _say(self, answer):
    client = self._client
    if client is not None:
      client.send(answer)

  def _tell(self, has_leader: bool):
    closed_round = self._shard.closed_round
    self._writer.write_scalars(
      closed_round,
      {
        names.TIME: time.time(),
        names.SHARD_ROUND: closed_round,
        names.SHARD_LED: has_leader,
      },
    )

  def _connect(self, give_up_s: float | None) -> ControlClient | None:
    """Makes one attempt to connect."""
    client = ControlClient(
      self._address,
      lambda message: self._items.put((client, message)),
      lambda reason: self._items.put((client, reason)),
      access=self._access,
      heard=orders.FROM_LEAD,
    )
    try:
      client.connect(ATTEMPT_S)
    except (ConnectFailed, HostUnknown) as error:
      if give_up_s is not None:
        if isinstance(error, HostUnknown | NotAdmitted):
          raise
        if time.monotonic() >= give_up_s:
          raise ConnectFailed(
            f'no leader at {self._address} within {self._connect_s} s: {error}'
          ) from error
      self._stopped.wait(RETRY_S)
      return None
    return client

  def _serve(self, client: ControlClient) -> bool:
    """Serves one session; returns True if the run is over."""
    self._shard.forget()
    self._client = client
    client.send(self._shard.hello(self._process))
    alive_s = time.monotonic() + ALIVE_EVERY_S
    try:
      while not self._stopped.is_set():
        if time.monotonic() >= alive_s:
          client.send(messages.Alive())
          alive_s = time.monotonic() + ALIVE_EVERY_S
        try:
          sender, item = self._items.get(timeout=ALIVE_EVERY_S)
        except queue.Empty:
          continue
        if isinstance(item, BaseException):
          raise item
        if sender is not client:
          continue  # From the session before.
        match item:
          case str():  # Why the session has ended.
            logging.info('the leader is gone: %s', item)
            return False
          case messages.Refusal():
            raise ShardRefused(item.reason)
          case orders.Depart():
            return True
          case orders.Accepted():
            logging.info('the leader has taken this shard')
          case orders.SaveParts():
            self._save(item)
          case _:
            answer = self._shard.perform(item)
            if answer is not None:
              client.send(answer)
        self._tell(has_leader=True)
    finally:
      client.close()
      self._tell(has_leader=False)
    return False

  def _save(self, order: orders.SaveParts):
    self._disk.save(order.closed_round, order.wait)
    if order.wait:
      self._say(orders.Saved(order.job))
