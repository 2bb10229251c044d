# SPDX-License-Identifier: Apache-2.0
"""A process at the other end, for tests: one JSON line in, one out."""

import json
import sys
import zlib

import numpy as np

from diloco.protocol import messages
from diloco.transport import control_server, data_plane, planes
from diloco.transport.control_channel import ControlLimits


class Peer:
  """Does what it is told; each command is a method of that name."""

  def __init__(self, kind: str):
    self._plane = planes.make_plane(kind, '127.0.0.1')
    self._publisher = None
    self._fetchers = {}
    self._server = None

  def publisher(self):
    if self._publisher is not None:
      self._publisher.close()
    self._publisher = self._plane.publisher('parent')
    return self._publisher.address

  def offer(self, handle, nbytes):
    data = np.random.default_rng(handle).integers(0, 256, nbytes, np.uint8)
    self._publisher.offer(handle, data)
    return zlib.crc32(data)

  def retire(self, handle):
    self._publisher.retire(handle)

  def pull(self, address, timeout_s, **payload):
    if address not in self._fetchers:
      self._fetchers[address] = self._plane.fetcher(address)
    try:
      data = self._fetchers[address].pull(
        messages.Payload(codec='raw', **payload), timeout_s
      )
    except data_plane.TransferFailed as error:
      return type(error).__name__
    return len(data)

  def forget(self, address):
    self._fetchers.pop(address).close()

  def control(self):
    """Starts a control server that answers each message with a `Refusal`."""
    self._server = control_server.ControlServer(
      '127.0.0.1:0',
      lambda session, message: session.send(
        messages.Refusal('heard', final=False)
      ),
      lambda session, reason: None,
      limits=ControlLimits(handshake_s=600.0),  # It may be frozen meanwhile.
    )
    return self._server.address


def main():
  peer = Peer(sys.argv[1])
  print(json.dumps('ready'), flush=True)
  for line in sys.stdin:
    command = json.loads(line)
    answer = getattr(peer, command.pop('do'))(**command)
    print(json.dumps(answer), flush=True)


if __name__ == '__main__':
  main()
