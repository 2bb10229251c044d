# SPDX-License-Identifier: Apache-2.0
"""Stands for docker on the hosts of a slice: one host of a learner each.

What of JAX matters here: the first host is where the others meet, and no world
takes a second one of a number; when one host dies the others do, but only
after a while. `python fake_slice.py run … --hosts=N --host=I --coordinator=A`.
"""

import os
import pathlib
import selectors
import socket
import sys
import time

FOLDER = pathlib.Path(os.environ['FAKES'])
NOTICED_S = 0.5  # Up to so long after a death the others live on.
MEET_S = 20.0


def main(argv):
  if argv[0] != 'run':
    return
  flags = dict(
    word[2:].partition('=')[::2] for word in argv if word.startswith('--')
  )
  hosts, host = int(flags['hosts']), int(flags['host'])
  port = int((FOLDER / 'port').read_text())  # In place of the coordinator's.
  (FOLDER / f'pid.{host}').write_text(str(os.getpid()))
  world = lead(hosts, port) if host == 0 else join(host, port)
  with (FOLDER / f'met.{host}').open('a') as file:
    file.write(f'{os.getpid()}\n')
  until_one_is_dead(world)
  # Each notices it at another time, as with heartbeats.
  time.sleep(NOTICED_S * (host + 1) / hosts)
  sys.exit(1)


def lead(hosts, port):
  """The connections of all others, or the end of this world."""
  give_up_at_s = time.monotonic() + MEET_S
  with socket.socket() as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(('127.0.0.1', port))
    server.listen()
    server.settimeout(MEET_S)
    found = {}
    while len(found) < hosts - 1:
      connection, _ = server.accept()
      host = connection.recv(1)[0]
      if host in found or time.monotonic() > give_up_at_s:
        sys.exit(1)
      found[host] = connection
  for connection in found.values():
    connection.send(b'!')
  return list(found.values())


def join(host, port):
  give_up_at_s = time.monotonic() + MEET_S
  while True:
    try:
      connection = socket.create_connection(('127.0.0.1', port), MEET_S)
      break
    except ConnectionRefusedError:
      if time.monotonic() > give_up_at_s:
        sys.exit(1)
      time.sleep(0.01)  # Nothing tells when the leading host listens.
  connection.send(bytes([host]))
  if connection.recv(1) != b'!':
    sys.exit(1)
  connection.settimeout(None)
  return [connection]


def until_one_is_dead(world):
  with selectors.DefaultSelector() as selector:
    for connection in world:
      selector.register(connection, selectors.EVENT_READ)
    selector.select()


if __name__ == '__main__':
  main(sys.argv[1:])
