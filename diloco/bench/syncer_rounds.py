# SPDX-License-Identifier: Apache-2.0
"""Measures a syncer's round, its parts, codecs, and what S shards merge.

A shard has its real work: it takes the bytes of M learners from memory, decodes
and checks them, merges, steps the outer optimizer, encodes the update and
offers it. Not measured: the network, and that the lead closes rounds in order.
GB/s are those of f32 contributions. Codecs are measured by themselves, too,
with Gaussian values, beside a plain copy.
"""

import dataclasses
import functools
import multiprocessing
import os
import queue
import time
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from diloco.bench.measurement import (
  BenchFigure,
  BenchSettings,
  copying,
  in_turns,
  timed,
)
from diloco.bench.real_run import get_config
from diloco.config import run_config
from diloco.numerics import codec, merge, outer, payload
from diloco.protocol import shard_messages as orders
from diloco.run import contributions
from diloco.run.payload_parts import announced
from diloco.run.spec import RunSpec, make_run_spec
from diloco.syncer.outer_state import make_optimizer
from diloco.syncer.shard import Shard
from diloco.transport.memory import MemoryNetwork, MemoryPlane

ANSWER_S = 600.0
LEARNERS = (2, 8)
SHARDS = 2
COPY = 'a copy of the contributions in f32'
COPY_OF_VALUES = 'a copy of the f32 values'
CODEC_TURNS = 5
BLOCK_SIZE = 128  # Values.
SCALE = 'bf16'
WIRE = 'int4'  # The default of both directions.
ONE_SHARD = 'one shard alone, on one core'


@dataclasses.dataclass(frozen=True)
class RoundSize:
  """The size of the merged model."""

  learners: int
  layers: int
  d_model: int
  rounds: int
  codec: str = 'int4'

  def run_spec(self, shards: int) -> RunSpec:
    config = get_config()
    config.model.update(
      layers=self.layers, d_model=self.d_model, d_ff=3 * self.d_model
    )
    config.protocol.update(learners=self.learners)
    config.codec.update(up=self.codec, down=self.codec)
    config.syncer.shards = shards
    return make_run_spec(run_config.build(config))


class Feeder:
  """The learners of one shard: their offers lie in memory."""

  def __init__(self, run_spec: RunSpec, shard: int, size: RoundSize):
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


def _serve(shard: int, shards: int, size: RoundSize, ready, begin, done):
  """Runs one process on one core, as if each shard had a machine of its own."""
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, {cores[shard % len(cores)]})
  feeder = Feeder(size.run_spec(shards), shard, size)
  feeder.run(1)  # Compiles, and touches all memory.
  ready.put(feeder.merged_bytes)
  begin.wait(ANSWER_S)
  feeder.run(size.rounds)
  done.put(shard)
  feeder.close()


def merged_gb_per_s(shards: int, size: RoundSize) -> float:
  """Returns what S shards, which work all the time, merge per second."""
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
  return size.rounds * nbytes / took_s / 1e9


def measure_shards(settings: BenchSettings) -> list[BenchFigure]:
  """Measures S shards beside one; wall time, one core each."""
  size = _size(settings, 4)
  alone = merged_gb_per_s(1, size)
  together = merged_gb_per_s(SHARDS, size)
  ratio = SHARDS * alone / together
  name = f'S = {SHARDS}, M = {size.learners}'
  return [
    BenchFigure('S = 1', alone, 'GB/s'),
    BenchFigure(name, together, 'GB/s', ratio, ONE_SHARD),
  ]


def measure(settings: BenchSettings) -> list[BenchFigure]:
  """Measures whole rounds and their parts, by CPU time, in one process."""
  found = []
  for learners in settings.pick(LEARNERS, LEARNERS[:1]):
    size = _size(settings, learners)
    found += [_whole(size), *_parts(size, settings.pick(5, 2))]
  return found


def _size(settings: BenchSettings, learners: int) -> RoundSize:
  layers, d_model = settings.pick((8, 512), (1, 64))
  return RoundSize(learners, layers, d_model, settings.pick(4, 1))


def _whole(size: RoundSize) -> BenchFigure:
  feeder = Feeder(size.run_spec(1), 0, size)
  feeder.run(1)  # Touches all memory.
  nbytes = feeder.merged_bytes
  took_s = timed(lambda: feeder.run(size.rounds), time.process_time)
  feeder.close()
  copy = copying(nbytes // 4)
  copy()  # Touches the memory that it writes.
  copied_s = timed(
    lambda: [copy() for _ in range(size.rounds)], time.process_time
  )
  speed = size.rounds * nbytes / took_s / 1e9
  name = f'M = {size.learners}, whole round'
  return BenchFigure(name, speed, 'GB/s', took_s / copied_s, COPY)


class Stages:
  """What hosts do with the largest fragment of a model, as calls."""

  def __init__(self, size: RoundSize):
    run_spec = size.run_spec(1)
    pieces = max(
      run_spec.layout.fragments, key=lambda each: sum(x.size for x in each)
    )
    up, down, rng = run_spec.up, run_spec.down, np.random.default_rng(0)
    vs = {
      m: {
        x.name: 1e-3 * rng.standard_normal(x.shape, np.float32) for x in pieces
      }
      for m in range(size.learners)
    }
    datas = [payload.encode(v, pieces, up) for v in vs.values()]
    pulled = {m: payload.inspect(d, pieces, up) for m, d in enumerate(datas)}
    weights = dict.fromkeys(vs, 1 / size.learners)
    optimizer = make_optimizer(run_spec.config)
    theta, other = vs[0], vs[size.learners - 1]
    state = outer.init(theta, optimizer)
    delta = merge.merge(vs, weights, pieces)
    _, update = outer.step(state, delta, optimizer, down, pieces)
    self.values = sum(x.size for x in pieces)
    self.syncer = {
      'checks and norms': lambda: [
        contributions.checked(payload.inspect(d, pieces, up)) for d in datas
      ],
      'RDA': functools.partial(merge.merge, pulled, weights, pieces),
      # It encodes the update, and decodes it as the learners will.
      'outer step': functools.partial(
        outer.step, state, delta, optimizer, down, pieces
      ),
      'encode': functools.partial(payload.encode, delta, pieces, down),
      'CRC': functools.partial(payload.piece_crcs, delta, pieces),
    }
    self.learner = {
      'encode': lambda: contributions.encode(theta, other, pieces, up),
      'take in': lambda: payload.crc(
        outer.add(theta, payload.decode(update, pieces, down)), pieces
      ),
    }


def _parts(size: RoundSize, turns: int) -> list[BenchFigure]:
  """Measures each part of a round of the largest fragment by itself."""
  stages = Stages(size)
  values = size.learners * stages.values
  copy, found = copying(values), []
  for name, call in stages.syncer.items():
    pair = in_turns(call, copy, turns)
    speed = 4 * values / pair.work_s / 1e9
    title = f'M = {size.learners}, {name}'
    found.append(BenchFigure(title, speed, 'GB/s', pair.ratio, COPY))
  return found


def measure_hosts(settings: BenchSettings) -> list[BenchFigure]:
  """Measures an exchange's stages on hosts, in seconds per GB of Θ_p in f32."""
  found, (few, many) = [], LEARNERS
  stages = Stages(_size(settings, few))
  copy, gb = copying(stages.values), 4 * stages.values / 1e9
  for name, call in stages.learner.items():
    pair = in_turns(call, copy, settings.pick(9, 2))
    found.append(
      BenchFigure(name, pair.work_s / gb, 's/GB', pair.ratio, COPY_OF_VALUES)
    )
  for learners in (few, many):
    whole = _whole(_size(settings, learners))
    name, each_s = f'round of {learners}', learners / whole.value
    found.append(BenchFigure(name, each_s, 's/GB', whole.ratio, COPY))
  return found


def host_speeds(seconds: Mapping[str, float]) -> dict[str, float]:
  """Returns the planner's speeds from what `measure_hosts` found, by name."""
  few, many = LEARNERS
  first, last = (seconds[f'round of {learners}'] for learners in LEARNERS)
  each = max(0.0, (last - first) / (many - few))
  return {
    'encode': seconds['encode'],
    'take_in': seconds['take in'],
    'round': max(0.0, first - few * each),
    'round_each': each,
  }


def measure_int4(settings: BenchSettings) -> list[BenchFigure]:
  """Measures the codec of the wire."""
  return list(_codecs([WIRE], settings))


def measure_others(settings: BenchSettings) -> list[BenchFigure]:
  """Measures all other codecs."""
  return list(_codecs([n for n in codec.NAMES if n != WIRE], settings))


def _codecs(
  names: Iterable[str], settings: BenchSettings
) -> Iterator[BenchFigure]:
  values = settings.pick(16 << 20, 1 << 16)
  x = np.random.default_rng(0).standard_normal(values, np.float32)
  copy = copying(values)
  for name in names:
    chosen = codec.make_codec(name, BLOCK_SIZE, SCALE)
    data = chosen.encode(x)
    calls = {
      'encode': lambda c=chosen: c.encode(x),
      'decode': lambda c=chosen, d=data: c.decode(d, values),
    }
    for what, call in calls.items():
      # This thread's: others of the process may be at work.
      pair = in_turns(call, copy, CODEC_TURNS, time.thread_time)
      speed = x.nbytes / pair.work_s / 1e9
      yield BenchFigure(
        f'{name} {what}', speed, 'GB/s', pair.ratio, COPY_OF_VALUES
      )
    yield BenchFigure(
      f'{name} size', data.nbytes / values, 'B/value',
      data.nbytes / x.nbytes, 'f32',
    )  # fmt: skip
    error = np.linalg.norm(chosen.decode(data, values) - x) / np.linalg.norm(x)
    yield BenchFigure(f'{name} relative error', float(error), '')
