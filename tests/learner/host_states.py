# SPDX-License-Identifier: Apache-2.0
"""Runs one of four hosts, of which learners of unlike meshes are made.

Run by `test_host_states.py`: a learner of all four trains a few steps, and
gives its state to one of a single host; that one gives it to one of two hosts,
and so on, until it comes back to four. What was found is a line of JSON.
"""

import dataclasses
import itertools
import json
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco.checkpoint.learner_records import HeldState
from diloco.config import run_config
from diloco.data import pipeline
from diloco.learner.hosts import host_transfer
from diloco.learner.programs import LearnerKinds, LearnerPrograms
from diloco.learner.replica import FragmentReplica, Mismatch, Replica
from diloco.numerics import payload
from diloco.protocol import host_messages, messages
from diloco.run.payload_parts import SliceMap, boxes_of
from diloco.run.spec import RunSpec, make_run_spec
from diloco.transport.auth import OPEN
from diloco.transport.planes import make_plane
from experiments import tests_tiny

STEPS, VERSION = 3, 7
NEWCOMER = 1, 4096
CHUNK_BYTES = 10_000  # So that there are several, and leaves are cut.
SAID_BYTES = 1 << 16
MESHES = {
  '4 hosts': {'fsdp': 2, 'tensor': 2},
  '1 host': {},
  '3 hosts': {'tensor': 3},
  '2 hosts': {'fsdp': 2},
}
CHAIN = ('4 hosts', '1 host', '2 hosts', '3 hosts', '4 hosts')


@dataclasses.dataclass
class Learner:
  """One host of a learner, with what it has."""

  run_spec: RunSpec
  programs: LearnerPrograms
  transfer: host_transfer.HostTransfer
  state: object

  @property
  def partition(self) -> str:
    partition = self.programs.partition
    return partition.to_text() if partition.host_count > 1 else ''


class Host:
  """Passes states on in one process, in step with all others."""

  def __init__(self, process: int, coordinator: str):
    jax.distributed.initialize(coordinator, 4, process)
    host_transfer.CHUNK_BYTES_MIN = 0
    host_transfer.CHUNK_BYTES_MAX = CHUNK_BYTES
    self._process = process
    self._plane = make_plane('grpc', '127.0.0.1', OPEN)
    config = tests_tiny.get_config()
    config.model.update(d_model=48, heads=6, kv_heads=6, head_dim=8, d_ff=48)
    config.model.update(vocab=264, layers=1)
    config.data.batch = 8
    self._run_spec = make_run_spec(run_config.build(config))
    self._kinds = LearnerKinds(self._run_spec)
    self._initial = self._run_spec.initial_fragments()
    self._crcs = tuple(
      payload.crc(theta, pieces)
      for theta, pieces in zip(self._initial, self._run_spec.layout.fragments)
    )

  def learner(self, name: str) -> Learner | None:
    """Makes this process's host of a learner; None if it is none of it."""
    if self._process >= int(name[0]):
      return None
    config = self._run_spec.config
    mesh = dataclasses.replace(config.mesh, **MESHES[name])
    run_spec, programs = self._kinds.of(dataclasses.replace(config, mesh=mesh))
    zeros = [
      {x.name: np.zeros(x.shape, np.float32) for x in needed}
      for needed in programs.holding.needed
    ]
    replica = self._replica(programs, zeros, 0)
    transfer = host_transfer.HostTransfer(
      run_spec, programs, replica, self._plane
    )
    return Learner(run_spec, programs, transfer, None)

  def _replica(self, programs, thetas, version: int) -> Replica:
    slice_map = SliceMap(self._run_spec.owners, programs.partition)
    held = [
      FragmentReplica(version, theta, crc)
      for theta, crc in zip(thetas, self._crcs)
    ]
    return Replica(self._run_spec, held, slice_map, programs.holding.host)

  def train(self, learner: Learner):
    """Makes a state whose moments are not zero, beside the first Θ."""
    run_spec, programs = learner.run_spec, learner.programs
    params, state = programs.init(run_spec.initial_parameters())
    size = run_spec.config.data.batch
    for i in range(STEPS):
      rows = pipeline.batch_at(run_spec.dataset(0), i * size, size)
      batch = programs.put_batch(rows)
      params, state, _ = programs.step(params, state, batch, 0.01, (0, i))
    learner.state = state
    thetas = [
      boxes_of(programs.holding.needed[p], theta)
      for p, theta in enumerate(self._initial)
    ]
    learner.transfer.replica.take_over(
      self._replica(programs, thetas, VERSION).held()
    )

  def pass_on(self, giver: Learner | None, taker: Learner | None, to: str):
    """Gives one learner's state to another; all processes take part.

    Returns:
      How many bytes this host pulled, and why it refused a state without its
      last chunk.
    """
    partition = self._say(taker.partition if taker else '')[0]
    said = {}
    if giver is not None:
      most = host_transfer.payloads_max(
        self._run_spec, giver.programs.state_like, int(to[0])
      )
      order = host_messages.DonateAt(
        *NEWCOMER, tuple(range(1, most + 1)), partition
      )
      address, parts = giver.transfer.donate(
        order, giver.transfer.replica.held(), HeldState(None, giver.state)
      )
      said = {
        'address': address,
        'parts': [(each.nbytes, each.crc) for each in parts],
        'most': most,
        'partition': giver.partition,
      }
    heard = [each for each in self._say(said) if each]
    result = 0, ''
    if taker is not None:
      result = self._take(taker, heard, int(to[0]))
    self._say('taken')
    if giver is not None:
      giver.transfer.end_donations(NEWCOMER)
    return result

  def _take(self, taker: Learner, heard: list[dict], hosts: int):
    fragments = len(self._initial)
    payloads = host_transfer.announced(
      tuple(range(1, heard[0]['most'] + 1)),
      self._run_spec.full.name,
      fragments * hosts,
      [[messages.Part(*each) for each in x['parts']] for x in heard],
    )

    def order(payloads):
      return host_messages.HostFetch(
        1,
        tuple(each['address'] for each in heard),
        payloads,
        heard[0]['partition'],
        (VERSION,) * fragments,
        self._crcs,
      )

    refusal = ''
    try:
      taker.transfer.fetch(order(payloads[: fragments * hosts + hosts]))
    except Mismatch as error:
      refusal = str(error)
    taker.transfer.fetch(order(payloads))
    taker.transfer.end_fetch(taken=True)
    taker.state = taker.programs.put_state(taker.transfer.take_adopted())
    own = payloads[taker.programs.holding.host :: hosts]
    return sum(each.nbytes for each in own), refusal

  def _say(self, what) -> list:
    """Returns what all processes say."""
    text = json.dumps(what).encode()
    padded = np.zeros(SAID_BYTES, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    said = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(each).rstrip(b'\0')) for each in said]


def main(process: int, coordinator: str):
  host = Host(process, coordinator)
  first = giver = host.learner(CHAIN[0])
  host.train(first)
  pulled = {}
  for before, name in itertools.pairwise(CHAIN):
    taker = host.learner(name)
    link = f'{before} to {name}'
    pulled[link] = host.pass_on(giver, taker, name)
    giver = taker
  fresh = first.programs.fresh_state(
    first.programs.init(first.run_spec.initial_parameters())[0]
  )
  mine = _bits(first.state)
  found = {
    'same': _bits(giver.state) == mine,
    'unlike_fresh': _bits(fresh) != mine,
    'theta': _thetas(giver) == _thetas(first),
    'versions': [each.version for each in giver.transfer.replica.held()],
    'pulled': pulled,
  }
  print(json.dumps(found), flush=True)


def _thetas(learner: Learner) -> list[bytes]:
  held = learner.transfer.replica.held()
  return [x.tobytes() for each in held for x in each.theta.values()]


def _bits(tree) -> list[bytes]:
  """Returns all that this process holds."""
  return [
    np.asarray(shard.data).tobytes()
    for leaf in jax.tree.leaves(tree)
    for shard in leaf.addressable_shards
  ]


if __name__ == '__main__':
  main(int(sys.argv[1]), sys.argv[2])
