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
from diloco.learner.hosts import host_transfer
from diloco.learner.programs import LearnerPrograms
from diloco.learner.replica import FragmentReplica, Mismatch, Replica
from diloco.protocol import host_messages, messages
from diloco.run.payload_parts import SliceMap
from diloco.run.spec import make_run_spec
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny

STEPS = 3
NEWCOMER = 1, 4096
CHUNK_BYTES = 10_000  # So that there are several, and one ends in a leaf.


def main(process: int, coordinator: str):
  jax.distributed.initialize(coordinator, 2, process)
  host_transfer.CHUNK_BYTES_MAX = CHUNK_BYTES
  run_spec, programs = _learner()
  params, state = _trained(run_spec, programs)
  plane = MemoryPlane(MemoryNetwork())
  donor = _transfer(run_spec, programs, plane)

  held = donor.replica.held()
  most = host_transfer.payloads_max(run_spec, programs.state_like)
  handles = tuple(range(1, most + 1))
  address, parts = donor.donate(
    NEWCOMER, handles, held, programs.copy_state(state)
  )
  payloads = host_transfer.announced(
    handles, run_spec.full.name, len(held), [parts]
  )
  newcomer = _transfer(run_spec, programs, plane)
  newcomer.fetch(_order(payloads, address, len(held)))
  newcomer.end_fetch(taken=True)
  placed = programs.put_state(newcomer.take_adopted())
  fresh = programs.fresh_state(params)

  # The same next step, to the bit, whichever state it is made with.
  batch = programs.put_batch(_batch(run_spec, STEPS))
  copied = {path: jax.numpy.copy(x) for path, x in params.items()}
  here = _bits(state), _bits(placed), _bits(fresh)
  one, _, _ = programs.step(params, state, batch, 0.01, (0, STEPS))
  other, _, _ = programs.step(copied, placed, batch, 0.01, (0, STEPS))
  found = {
    'same': here[0] == here[1],
    'unlike_fresh': here[0] != here[2],
    'same_step': _bits(one) == _bits(other),
    'theta': _thetas(newcomer) == _thetas(donor),
    'versions': [each.version for each in newcomer.replica.held()],
    'chunks': len(parts) - len(held),
    'bytes': host_transfer.bytes_here(programs.state_like),
    'whole_bytes': host_transfer.size_bytes(programs.state_like),
    'refused': _refusal(newcomer, payloads, address, len(held)),
  }
  donor.end_donations(NEWCOMER)
  print(json.dumps(found), flush=True)


def _learner():
  config = tests_tiny.get_config()
  config.model.update(heads=4, kv_heads=4, head_dim=8)
  config.mesh.fsdp = 4
  config.data.batch = 8
  run_spec = make_run_spec(run_config.build(config))
  return run_spec, LearnerPrograms(run_spec)


def _batch(run_spec, i: int):
  size = run_spec.config.data.batch
  return pipeline.batch_at(run_spec.dataset(0), i * size, size)


def _trained(run_spec, programs: LearnerPrograms):
  params, state = programs.init(run_spec.initial_parameters())
  for i in range(STEPS):
    batch = programs.put_batch(_batch(run_spec, i))
    params, state, _ = programs.step(params, state, batch, 0.01, (0, i))
  return params, state


def _transfer(run_spec, programs: LearnerPrograms, plane):
  holding = programs.holding
  held = [
    FragmentReplica(0, holding.needed_of(p, theta), 0)
    for p, theta in enumerate(run_spec.initial_fragments())
  ]
  slice_map = SliceMap(run_spec.owners, programs.partition)
  replica = Replica(run_spec, held, slice_map, holding.host)
  return host_transfer.HostTransfer(run_spec, programs, replica, plane)


def _order(payloads, address: str, fragments: int):
  return host_messages.HostFetch(
    *(1, (address,) * 2, payloads), *((7,) * fragments, (1,) * fragments)
  )


def _refusal(newcomer, payloads, address: str, fragments: int) -> str:
  """Why a state that lacks its last chunk is not taken."""
  last = payloads[-1]
  short = (*payloads[:-1], messages.Payload(last.handle, last.codec, 0, 0))
  try:
    newcomer.fetch(_order(short, address, fragments))
  except Mismatch as error:
    return str(error)
  return ''


def _thetas(transfer) -> list[bytes]:
  return _bits([each.theta for each in transfer.replica.held()])


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
