# SPDX-License-Identifier: Apache-2.0
"""A process that is not of the learner, in the place of its host 1.

  python stranger.py ADDRESS

It joins the JAX world whose coordination service is at ADDRESS, and says so.
"""

import os
import sys

import jax

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
  print(f'joined as {jax.process_index()}', flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
  os._exit(0)  # Without a farewell, for which JAX would wait.
