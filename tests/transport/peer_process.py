# SPDX-License-Identifier: Apache-2.0
"""A peer in a process of its own, to be killed, stopped and continued."""

import dataclasses
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading

from diloco.protocol import messages
from diloco.transport import data_plane

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
START_S = 240.0  # Until it has imported JAX.
WAIT_S = 120.0


class Process:
  """A `transport_peer.py`, and the tests' way to talk to it."""

  def __init__(self, kind: str):
    self._process = subprocess.Popen(
      [sys.executable, str(HERE / 'transport_peer.py'), kind],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
    )
    self._answers = queue.Queue()
    self._reader = threading.Thread(target=self._read)
    self._reader.start()
    self.answer(START_S)

  def _read(self):
    for line in self._process.stdout:
      self._answers.put(json.loads(line))

  def tell(self, **command):
    self._process.stdin.write(json.dumps(command) + '\n')
    self._process.stdin.flush()

  def answer(self, deadline_s: float = WAIT_S):
    return self._answers.get(timeout=deadline_s)

  def ask(self, **command):
    self.tell(**command)
    return self.answer()

  def offer(self, handle: int, nbytes: int) -> messages.Payload:
    crc = self.ask(do='offer', handle=handle, nbytes=nbytes)
    return messages.Payload(handle, 'raw', nbytes, crc)

  def pull(
    self, publisher: data_plane.Publisher, payload: messages.Payload, **more
  ):
    fields = dataclasses.asdict(payload)
    del fields['codec']
    self.tell(do='pull', address=publisher.address, **fields, **more)

  def stop(self):
    """SIGSTOP; returns once the kernel says that it is stopped."""
    self._process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(self._process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)

  def go_on(self):
    self._process.send_signal(signal.SIGCONT)

  def kill(self):
    self._process.kill()
    self._process.wait()

  def close(self):
    self.kill()
    self._reader.join()
    self._process.stdin.close()
    self._process.stdout.close()
