# SPDX-License-Identifier: Apache-2.0
"""Runs one of two hosts of a learner that gives its state to itself.

Run by `test_host_states.py`: two processes of one JAX world train a few steps;
each offers its own part of Θ and of the inner state, pulls it as a newcomer's
host of the same number does, and places it on its devices. What it found is a
line of JSON.
"""

import json
import sys

import jax
import numpy as np

from diloco.config import run_config
from diloco.data import pipeline
from diloco.learner import inner_device, peer_bootstrap
from diloco.learner.device import Device
from diloco.learner.replica import (
  FragmentReplica,
  Mismatch,
  Replica,
  ReplicaCodec,
)
from diloco.protocol import messages
from diloco.run import payload_parts
from diloco.run.host_slices import SliceMap
from diloco.run.payload_parts import TransferPace
from diloco.run.spec import make_run_spec
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny

STEPS = 3
NEWCOMER = 1, 4096
CHUNK_BYTES = 10_000  # So that there are several, and one ends in a leaf.


def main(process: int, coordinator: str):
  jax.distributed.initialize(coordinator, 2, process)
  inner_device.CHUNK_BYTES_MAX = CHUNK_BYTES
  run_spec, device = _learner()
  params, state = _trained(run_spec, device)
  part = _part(run_spec, device)
  plane = MemoryPlane(MemoryNetwork())

  thetas = [each.theta for each in part.held()]
  most = peer_bootstrap.payloads_max(run_spec, device.state_like)
  handles = tuple(range(1, most + 1))
  given = peer_bootstrap.Donations(part, plane)
  address, parts = given.offer(
    NEWCOMER, handles, thetas, device.copy_state(state)
  )
  payloads = peer_bootstrap.announced(
    handles, run_spec.full.name, len(thetas), [parts]
  )
  newcomer = _part(run_spec, device)
  fetched = _fetch(newcomer, payloads, address, run_spec, plane)
  newcomer.adopt((7,) * len(thetas), fetched.data, (1,) * len(thetas))
  placed = device.put_state(fetched.inner_state)
  fresh = device.fresh_state(params)

  # The same next step, to the bit, whichever state it is made with.
  batch = device.put_batch(_dataset(run_spec)[STEPS])
  copied = {path: jax.numpy.copy(x) for path, x in params.items()}
  here = _bits(state), _bits(placed), _bits(fresh)
  one, _, _ = device.step(params, state, batch, 0.01, (0, STEPS))
  other, _, _ = device.step(copied, placed, batch, 0.01, (0, STEPS))
  found = {
    'same': here[0] == here[1],
    'unlike_fresh': here[0] != here[2],
    'same_step': _bits(one) == _bits(other),
    'theta': _bits([x.theta for x in newcomer.held()]) == _bits(thetas),
    'versions': [each.version for each in newcomer.held()],
    'chunks': len(parts) - len(thetas),
    'bytes': part.state_bytes(),
    'whole_bytes': inner_device.size_bytes(device.state_like),
    'refused': _refusal(newcomer, payloads, address, run_spec, plane),
  }
  given.end(NEWCOMER)
  print(json.dumps(found), flush=True)


def _learner():
  config = tests_tiny.get_config()
  config.model.update(heads=4, kv_heads=4, head_dim=8)
  config.mesh.fsdp = 4
  config.data.batch = 8
  run_spec = make_run_spec(run_config.build(config))
  return run_spec, Device(run_spec)


def _dataset(run_spec):
  data = run_spec.config.data
  return pipeline.make_dataset(
    run_spec.text.train, data.seq_len, data.batch, 4, 0, 0
  )


def _trained(run_spec, device: Device):
  params, state = device.init(run_spec.initial_parameters())
  dataset = _dataset(run_spec)
  for i in range(STEPS):
    batch = device.put_batch(dataset[i])
    params, state, _ = device.step(params, state, batch, 0.01, (0, i))
  return params, state


def _part(run_spec, device: Device):
  holding = device.holding
  held = [
    FragmentReplica(0, holding.needed_of(p, theta), 0)
    for p, theta in enumerate(run_spec.initial_fragments())
  ]
  slice_map = SliceMap(run_spec.owners, device.partition)
  replica = Replica(run_spec, held, slice_map, holding.host)
  return ReplicaCodec(run_spec, device, replica)


def _fetch(part, payloads, address, run_spec, plane):
  return peer_bootstrap.fetch(
    [payload_parts.only(each, 0) for each in payloads],
    address,
    part,
    len(run_spec.layout.fragments),
    run_spec.full.name,
    plane,
    TransferPace(1.0),
  )


def _refusal(part, payloads, address, run_spec, plane) -> str:
  """Why a state that lacks its last chunk is not taken."""
  last = payloads[-1]
  short = (*payloads[:-1], messages.Payload(last.handle, last.codec, 0, 0))
  try:
    _fetch(part, short, address, run_spec, plane)
  except Mismatch as error:
    return str(error)
  return ''


def _bits(tree) -> list[bytes]:
  """Returns all that this process holds."""
  return [
    np.asarray(each).tobytes()
    for leaf in jax.tree.leaves(tree)
    for each in (
      [shard.data for shard in leaf.addressable_shards]
      if isinstance(leaf, jax.Array)
      else [leaf]
    )
  ]


if __name__ == '__main__':
  main(int(sys.argv[1]), sys.argv[2])
