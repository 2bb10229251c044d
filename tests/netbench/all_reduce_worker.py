# SPDX-License-Identifier: Apache-2.0
r"""One worker of real data-parallel training over the links of a benchmark.

  python -m tests.netbench.all_reduce_worker --rank=0 --world=2 \
    --coordinator=HOST:PORT --host=HOST --values=400000 --step_s=0.25 --out=FILE

All workers are one computation of JAX with the collectives of gloo. Each step
sleeps, as devices would compute, and then takes the mean of all workers'
gradients of a quadratic model: one all-reduce of as many f32 as the model has
parameters. A line of metrics per step goes into a file, as of a learner.
"""

import argparse
import ctypes
import os
import pathlib
import socket
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco.metrics import names
from diloco.metrics.writer import JsonlWriter

CLONE_NEWUTS = 0x04000000  # linux/sched.h
START_S = 120
LEARNING_RATE = 0.02


def name_this_host(address: str) -> None:
  """Gives this process a host name of its own, which is its address.

  Gloo listens where the host's name leads; the name of the machine leads out of
  the namespace.
  """
  libc = ctypes.CDLL(None, use_errno=True)
  if libc.unshare(CLONE_NEWUTS):
    raise OSError(ctypes.get_errno(), 'unshare(CLONE_NEWUTS)')
  socket.sethostname(address)


def make_step(values: int) -> tuple[Callable, jax.Array, jax.Array]:
  """Returns the compiled step, the parameters and each worker's noise."""
  mesh = Mesh(np.array(jax.devices()), ('data',))
  split, whole = PartitionSpec('data'), PartitionSpec()

  def step(theta_N, xi_N):
    gradient_N = jax.lax.pmean(theta_N - xi_N, 'data')
    return theta_N - LEARNING_RATE * gradient_N

  sharded = jax.shard_map(
    step, mesh=mesh, in_specs=(whole, split), out_specs=whole
  )
  own = np.random.default_rng(jax.process_index()).normal(size=values)
  xi = jax.make_array_from_process_local_data(
    NamedSharding(mesh, split), own.astype(np.float32)
  )
  theta = jax.device_put(
    jnp.zeros(values, jnp.float32), NamedSharding(mesh, whole)
  )
  return jax.jit(sharded), theta, xi


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rank', type=int, required=True)
  parser.add_argument('--world', type=int, required=True)
  parser.add_argument('--coordinator', required=True)
  parser.add_argument('--host', required=True)
  parser.add_argument('--values', type=int, required=True)
  parser.add_argument('--step_s', type=float, required=True)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  given = parser.parse_args()
  name_this_host(given.host)
  jax.config.update('jax_platforms', 'cpu')
  if given.world > 1:
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(
      given.coordinator,
      given.world,
      given.rank,
      initialization_timeout=START_S,
    )
  step, theta, xi = make_step(given.values)
  theta = jax.block_until_ready(step(theta, xi))
  parent = os.getppid()
  writer, n = JsonlWriter(given.out), 0
  began_s = time.monotonic()
  while os.getppid() == parent:
    time.sleep(given.step_s)
    theta = jax.block_until_ready(step(theta, xi))
    n += 1
    now_s = time.monotonic()
    step_s, began_s = now_s - began_s, now_s
    writer.write_scalars(n, {names.TIME: time.time(), names.STEP_TIME: step_s})


if __name__ == '__main__':
  main()
