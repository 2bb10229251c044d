# SPDX-License-Identifier: Apache-2.0
"""JAX's coordination service outside of a learner's slices.

  python -m diloco.learner.coordination

`jax.distributed` has its process 0 serve; when that dies, all others are ended
within 0.1 s, with whatever they hold. For a learner of several slices this
process serves instead, one world after the other. It reads a line 'HOSTS
HOST:PORT' for each, and answers with the address once it listens there.
"""

import sys

from jax._src.lib import _jax  # There is no public way to serve alone.

HEARTBEAT_S = 60  # Hosts that are gone are noticed by their connections.
SHUTDOWN_S = 10


def main():
  """Serves until its input ends."""
  service = None
  for line in sys.stdin:
    hosts, address = line.split()
    if service is not None:
      service.shutdown()
    service = _jax.get_distributed_runtime_service(
      address,
      int(hosts),
      heartbeat_timeout=HEARTBEAT_S,
      shutdown_timeout=SHUTDOWN_S,
      recoverable=False,
    )
    print(address, flush=True)


if __name__ == '__main__':
  main()
