# SPDX-License-Identifier: Apache-2.0
"""Measures how much a syncer of S shards merges per second, for several S.

  python -m tests.benchmarks.shards [--layers=8] [--d_model=512] …

Each shard is a process on one core with its real share of the work: it takes
the bytes of M learners from memory, decodes and checks them, merges, steps the
outer optimizer, encodes the update and offers it. Not measured: the network,
and that the lead closes rounds in order. MB are those of f32 contributions.
"""

import dataclasses
import json
import multiprocessing
import os
import queue
import time

import numpy as np
from absl import app, flags

from diloco.config import run_config
from diloco.numerics import payload
from diloco.protocol import shard_messages as orders
from diloco.run.payload_parts import announced
from diloco.run.spec import RunSpec, make_run_spec
from diloco.syncer.shard import Shard
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import common

_SHARDS = flags.DEFINE_list('shards', ['1', '2', '4'], 'S, one after another.')
_LEARNERS = flags.DEFINE_integer('learners', 4, 'M.')
_LAYERS = flags.DEFINE_integer('layers', 8, 'Of the decoder.')
_D_MODEL = flags.DEFINE_integer('d_model', 512, 'Of the decoder.')
_ROUNDS = flags.DEFINE_integer('rounds', 2, 'Of each fragment.')
_CODEC = flags.DEFINE_string('codec', 'int4', 'Up and down.')

ANSWER_S = 600.0


@dataclasses.dataclass(frozen=True)
class Size:
  """The size of the merged model."""

  learners: int
  layers: int
  d_model: int
  rounds: int
  codec: str

  def run_spec(self, shards: int) -> RunSpec:
    config = common.base()
    config.model.update(
      layers=self.layers, d_model=self.d_model, d_ff=3 * self.d_model
    )
    config.data.update(source='grammar', grammar_bytes=1 << 18)
    config.protocol.update(learners=self.learners)
    config.codec.update(up=self.codec, down=self.codec)
    config.syncer.shards = shards
    return make_run_spec(run_config.build(config))


class _Feeder:
  """The learners of one shard: their offers lie in memory."""

  def __init__(self, run_spec: RunSpec, shard: int, size: Size):
    self._answers: queue.SimpleQueue = queue.SimpleQueue()
    network = MemoryNetwork()
    self._run_spec = run_spec
    self._size = size
    self._number = shard
    self._shard = Shard(
      run_spec,
      MemoryPlane(network),
      shard,
      answer=self._answers.put,
      crash=self._answers.put,
    )
    plane = MemoryPlane(network)
    self._publishers = [plane.publisher('syncer') for _ in range(size.learners)]
    for learner, publisher in enumerate(self._publishers):
      self._shard.perform(orders.Admit(learner, 1, (publisher.address,), ''))
    self._job = 0
    self._data = {
      p: self._contribution(p) for p in run_spec.owners.of_shard(shard)
    }

  @property
  def merged_bytes(self) -> int:
    """Bytes of f32 contributions, in one round of every own fragment."""
    owners = self._run_spec.owners
    values = sum(
      piece.size for p in self._data for piece in owners.pieces(p, self._number)
    )
    return 4 * values * self._size.learners

  def run(self, rounds: int):
    for round_ in range(1, rounds + 1):
      for p, data in self._data.items():
        self._close(round_, p, data)

  def close(self):
    self._shard.close()

  def _contribution(self, p: int) -> np.ndarray:
    pieces = self._run_spec.owners.pieces(p, self._number)
    rng = np.random.default_rng(p)
    arrays = {
      x.name: 1e-3 * rng.standard_normal(x.shape, np.float32) for x in pieces
    }
    return payload.encode(arrays, pieces, self._run_spec.up)

  def _close(self, round_: int, p: int, data: np.ndarray):
    """Makes one round of one fragment: all M are pulled, then merged."""
    jobs = []
    parts = [np.empty(0, np.uint8)] * self._run_spec.owners.shards
    parts[self._number] = data
    whole = self._announced(p, parts)
    for learner, publisher in enumerate(self._publishers):
      self._job += 1
      jobs.append(self._job)
      publisher.offer(self._job, data)
      found = dataclasses.replace(whole, handle=self._job)
      self._shard.perform(
        orders.PullPart(self._job, round_, learner, 1, p, found)
      )
    for _ in jobs:
      self._answer(orders.PartPulled)
    m = len(jobs)
    self._job += 1
    learners, weights = tuple(range(m)), (1 / m,) * m
    merge = orders.MergePart(
      self._job, round_, p, tuple(jobs), learners, weights
    )
    self._shard.perform(merge)
    self._answer(orders.PartMerged)
    self._shard.perform(orders.InstallPart(self._job, round_, p))
    to = tuple(orders.Recipient(each, 1, self._job) for each in learners)
    self._shard.perform(orders.PublishPart(self._job, self._job, p, to))

  def _announced(self, p: int, parts):
    """Returns the payload of a learner whose other parts other shards pull."""
    found = announced(1, self._run_spec.up.name, parts)
    if not found.parts:
      return found
    owners, up = self._run_spec.owners, self._run_spec.up
    sizes = [
      payload.payload_bytes(owners.pieces(p, s), up)
      for s in range(owners.shards)
    ]
    parts = tuple(
      dataclasses.replace(part, nbytes=nbytes)
      for part, nbytes in zip(found.parts, sizes)
    )
    return dataclasses.replace(found, nbytes=sum(sizes), parts=parts)

  def _answer(self, kind: type):
    answer = self._answers.get()
    if isinstance(answer, BaseException):
      raise answer
    assert isinstance(answer, kind), answer


def _serve(shard: int, shards: int, size: Size, ready, begin, done):
  """Runs one process on one core, as if each shard had a machine of its own."""
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, {cores[shard % len(cores)]})
  feeder = _Feeder(size.run_spec(shards), shard, size)
  feeder.run(1)  # Compiles, and touches all memory.
  ready.put(feeder.merged_bytes)
  begin.wait(ANSWER_S)
  feeder.run(size.rounds)
  done.put(shard)
  feeder.close()


def measure(shards: int, size: Size) -> dict:
  """Returns merged MB/s of a syncer of S shards."""
  context = multiprocessing.get_context('spawn')
  ready, done = context.Queue(), context.Queue()
  begin = context.Event()
  processes = [
    context.Process(
      target=_serve, args=(s, shards, size, ready, begin, done), daemon=True
    )
    for s in range(shards)
  ]
  for process in processes:
    process.start()
  nbytes = sum(ready.get(timeout=ANSWER_S) for _ in processes)
  began_s = time.monotonic()
  begin.set()
  for _ in processes:
    done.get(timeout=ANSWER_S)
  took_s = time.monotonic() - began_s
  for process in processes:
    process.join()
  mb = size.rounds * nbytes / 1e6
  return {
    'shards': shards,
    'merged_mb': round(mb, 1),
    'seconds': round(took_s, 3),
    'mb_per_s': round(mb / took_s, 1),
  }


def main(_):
  """Prints one JSON line for the machine, and one for each S."""
  size = Size(
    _LEARNERS.value,
    _LAYERS.value,
    _D_MODEL.value,
    _ROUNDS.value,
    _CODEC.value,
  )
  print(json.dumps({'cores': os.cpu_count(), **dataclasses.asdict(size)}))
  for shards in _SHARDS.value:
    print(json.dumps(measure(int(shards), size)), flush=True)


if __name__ == '__main__':
  app.run(main)
