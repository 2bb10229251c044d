# SPDX-License-Identifier: Apache-2.0
"""Runs one host of a JAX world that sums over all devices repeatedly.

  python group_member.py --hosts=N --host=I --coordinator=ADDRESS

Each sum is a line of stdout: how many devices of how many hosts, and the sum.
"""

import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def main(*flags):
  given = dict(flag.lstrip('-').split('=') for flag in flags)
  jax.distributed.initialize(
    given['coordinator'],
    int(given['hosts']),
    int(given['host']),
    heartbeat_timeout_seconds=600,
  )
  devices = jax.devices()
  mesh = jax.sharding.Mesh(devices, 'x')
  over_all = NamedSharding(mesh, PartitionSpec('x'))
  values = np.arange(len(devices), dtype=np.float32)
  shards = jax.make_array_from_callback(
    values.shape, over_all, lambda index: values[index]
  )
  add = jax.jit(jax.numpy.sum)
  while True:
    total = float(add(shards))
    hosts = len({device.process_index for device in devices})
    print(f'{len(devices)} devices of {hosts} hosts: {total}', flush=True)
    time.sleep(0.05)  # The log is to stay short.


if __name__ == '__main__':
  main(*sys.argv[1:])
