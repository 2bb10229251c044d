# SPDX-License-Identifier: Apache-2.0
"""A way to the syncer that a test opens when it wants to."""

import socket
import threading

CHUNK_BYTES = 1 << 16


class Gate:
  """Listens at `address`; carries bytes to `target` once it is open.

  So a process can be held where it is about to say hello.

  Args:
    target: host:port.
  """

  def __init__(self, target: str):
    host, port = target.rsplit(':', 1)
    self._target = host, int(port)
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.reached = threading.Event()  # A caller waits.
    self._open = threading.Event()
    threading.Thread(target=self._accept, daemon=True).start()

  @property
  def address(self) -> str:
    """The gate's host:port."""
    return f'127.0.0.1:{self._listener.getsockname()[1]}'

  def open(self):
    self._open.set()

  def _accept(self):
    while True:
      near, _ = self._listener.accept()
      threading.Thread(target=self._carry, args=(near,), daemon=True).start()

  def _carry(self, near: socket.socket):
    # A process may look whether something listens before it has much to say.
    if near.recv(1, socket.MSG_PEEK):
      self.reached.set()
      self._open.wait()
    try:
      far = socket.create_connection(self._target)
    except OSError:
      near.close()  # As if it had been refused here.
      return
    for pair in ((near, far), (far, near)):
      threading.Thread(target=self._pump, args=pair, daemon=True).start()

  def _pump(self, source: socket.socket, sink: socket.socket):
    """Carries bytes until either end is closed; then both are."""
    try:
      while data := source.recv(CHUNK_BYTES):
        sink.sendall(data)
    except OSError:
      pass  # The other thread has closed it, or a process was killed.
    for each in (source, sink):
      each.close()
