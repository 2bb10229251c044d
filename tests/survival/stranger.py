# SPDX-License-Identifier: Apache-2.0
"""A process that is not of the learner, in the place of its host 1.

  python stranger.py ADDRESS

It joins the JAX world whose coordination service is at ADDRESS, hears what the
leading host says to all, and goes where that leads. Each line of stdout is what
it has got; the last one why it got no further.
"""

import os
import sys

import jax

from diloco.learner.hosts import process_group
from diloco.transport import host_channel

WAIT_S = 10.0  # For a service of JAX; the learner's own wait is longer.


def main(address: str):
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(
    address,
    2,
    1,
    initialization_timeout=int(WAIT_S),
    heartbeat_timeout_seconds=10,
  )
  print('joined', flush=True)
  heard = process_group._spread(None)
  print(f'heard {len(heard)} words', flush=True)
  host, port, *secret = heard
  try:
    host_channel.connect((host, port), (secret or [''])[0].encode())
  except host_channel.GroupLost as error:
    print(f'refused: {error}', flush=True)
    return
  print('let in', flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
  os._exit(0)  # Without a farewell, for which JAX would wait.
