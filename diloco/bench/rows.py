# SPDX-License-Identifier: Apache-2.0
"""The benchmarks by name; and those that need no process of their own.

A syncer's round, its parts, what hosts do with a fragment, codecs, the lab and
the simulator: most are `Comparison`s, which one loop measures. The syncer has
its real work: it takes the bytes of M learners from memory, decodes and checks
them, merges, steps the outer optimizer, encodes the update and offers it. Not
measured: the network. GB/s are those of f32 contributions.
"""

import functools
import queue
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from diloco.bench import process_rows
from diloco.bench.measurement import (
  BenchFigure,
  BenchRow,
  BenchSettings,
  Comparison,
)
from diloco.bench.real_run import get_config
from diloco.config import run_config
from diloco.fleets import fleet
from diloco.fleets.failures import FaultEvents
from diloco.fleets.fleet import Fleet
from diloco.lab.process_arrays import ArrayBackend
from diloco.learner.device import Device
from diloco.numerics import codec, merge, outer, payload
from diloco.protocol import shard_messages as orders
from diloco.protocol.config import ProtocolConfig
from diloco.run import contributions
from diloco.run.payload_parts import announced
from diloco.run.spec import RunSpec, make_run_spec
from diloco.simulator.cluster import Cluster, ClusterOptions, Timing
from diloco.simulator.network import Network
from diloco.syncer.outer_state import make_optimizer
from diloco.syncer.shard import Shard
from diloco.transport.memory import MemoryNetwork, MemoryPlane

COPY = 'a copy of the contributions in f32'
COPY_OF_VALUES = 'a copy of the f32 values'
FEW, MANY = 2, 8  # Learners of a round.
WIRE = 'int4'  # The default of both directions.
LAB_LEARNERS = 4
FRAGMENTS = 24  # Of the simulator; steps of the lab in a turn.


def copying(values: int) -> Callable[[], object]:
  """Returns a call that copies so many f32 into memory that it keeps."""
  source = np.ones(values, np.float32)
  return functools.partial(np.copyto, np.zeros_like(source), source)


def gb_per_s(nbytes: int) -> Callable[[float], float]:
  """Returns what makes GB/s of the seconds that so many bytes take."""
  return lambda seconds: nbytes / seconds / 1e9


# The syncer.


def _run_spec(settings: BenchSettings, learners: int) -> RunSpec:
  config = get_config()
  layers, d_model = settings.pick((8, 512), (1, 64))
  config.model.update(layers=layers, d_model=d_model, d_ff=3 * d_model)
  config.protocol.update(learners=learners)
  return make_run_spec(run_config.build(config))


def _noise(pieces, seed: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  return {
    x.name: 1e-3 * rng.standard_normal(x.shape, np.float32) for x in pieces
  }


class SyncerRounds:
  """A syncer whose learners' offers lie in memory: all that a round takes."""

  def __init__(self, run_spec: RunSpec):
    self._answers: queue.SimpleQueue = queue.SimpleQueue()
    network = MemoryNetwork()
    answer = self._answers.put
    self._shard = Shard(
      run_spec, MemoryPlane(network), 0, answer=answer, crash=answer
    )
    plane = MemoryPlane(network)
    learners = range(run_spec.config.protocol.learners)
    self._publishers = [plane.publisher('syncer') for _ in learners]
    for m, publisher in enumerate(self._publishers):
      self._shard.perform(orders.Admit(m, 1, (publisher.address,), ''))
    self._job = self._round = 0
    self._up = run_spec.up
    self._data = [
      payload.encode(_noise(pieces, p), pieces, self._up)
      for p, pieces in enumerate(run_spec.layout.fragments)
    ]
    self.values = len(learners) * sum(run_spec.layout.sizes)

  def run(self):
    """Makes one round of every fragment."""
    self._round += 1
    for p, data in enumerate(self._data):
      self._close(p, data)

  def close(self):
    self._shard.close()

  def _close(self, p: int, data: np.ndarray):
    """Makes one round of one fragment: all M are pulled, then merged."""
    jobs = []
    for m, publisher in enumerate(self._publishers):
      jobs.append(self._next_job())
      publisher.offer(jobs[-1], data)
      offered = announced(jobs[-1], self._up.name, [data])
      self._shard.perform(
        orders.PullPart(jobs[-1], self._round, m, 1, p, offered)
      )
    for _ in jobs:
      self._take(orders.PartPulled)
    job, weights = self._next_job(), (1 / len(jobs),) * len(jobs)
    learners = tuple(range(len(jobs)))
    self._shard.perform(
      orders.MergePart(job, self._round, p, tuple(jobs), learners, weights)
    )
    self._take(orders.PartMerged)
    self._shard.perform(orders.InstallPart(job, self._round, p))
    to = tuple(orders.Recipient(m, 1, job) for m in learners)
    self._shard.perform(orders.PublishPart(job, job, p, to))

  def _next_job(self) -> int:
    self._job += 1
    return self._job

  def _take(self, kind: type):
    answer = self._answers.get()
    if isinstance(answer, BaseException):
      raise answer
    assert isinstance(answer, kind), answer


class Stages:
  """What hosts do with the largest fragment of a model, as calls."""

  def __init__(self, run_spec: RunSpec):
    pieces = max(
      run_spec.layout.fragments, key=lambda each: sum(x.size for x in each)
    )
    up, down = run_spec.up, run_spec.down
    vs = {
      m: _noise(pieces, m) for m in range(run_spec.config.protocol.learners)
    }
    datas = [payload.encode(v, pieces, up) for v in vs.values()]
    pulled = {m: payload.inspect(d, pieces, up) for m, d in enumerate(datas)}
    weights = dict.fromkeys(vs, 1 / len(vs))
    optimizer = make_optimizer(run_spec.config)
    theta, other = vs[0], vs[len(vs) - 1]
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


def measure_whole(
  settings: BenchSettings, learners: int, name: str, in_seconds: bool
) -> BenchFigure:
  """Measures whole rounds, in GB/s or s/GB of Θ in f32."""
  rounds = SyncerRounds(_run_spec(settings, learners))
  gb, unit = 4 * rounds.values / 1e9, 's/GB' if in_seconds else 'GB/s'
  found = Comparison(
    name,
    unit,
    lambda s: learners * s / gb if in_seconds else gb / s,
    rounds.run,
    copying(rounds.values),
    COPY,
    settings.pick(4, 1),
  ).measure()
  rounds.close()
  return found


def measure_round(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures whole rounds and their parts, by CPU time, in one process."""
  for learners in settings.pick((FEW, MANY), (FEW,)):
    name = f'M = {learners}'
    yield measure_whole(settings, learners, f'{name}, whole round', False)
    stages = Stages(_run_spec(settings, learners))
    values = learners * stages.values
    speed, copy = gb_per_s(4 * values), copying(values)
    for part, call in stages.syncer.items():
      yield Comparison(
        f'{name}, {part}', 'GB/s', speed, call, copy, COPY, settings.pick(5, 2)
      ).measure()


def measure_hosts(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures an exchange's stages on hosts, in seconds per GB of Θ_p in f32."""
  stages = Stages(_run_spec(settings, FEW))
  copy, gb = copying(stages.values), 4 * stages.values / 1e9
  for name, call in stages.learner.items():
    yield Comparison(
      name, 's/GB', lambda seconds: seconds / gb, call, copy, COPY_OF_VALUES,
      settings.pick(9, 2),
    ).measure()  # fmt: skip
  for learners in (FEW, MANY):
    yield measure_whole(settings, learners, f'round of {learners}', True)


def host_speeds(seconds: Mapping[str, float]) -> dict[str, float]:
  """Returns the planner's speeds from what `measure_hosts` found, by name."""
  first, last = (seconds[f'round of {learners}'] for learners in (FEW, MANY))
  each = max(0.0, (last - first) / (MANY - FEW))
  return {
    'encode': seconds['encode'],
    'take_in': seconds['take in'],
    'round': max(0.0, first - FEW * each),
    'round_each': each,
  }


# Codecs.


def measure_codecs(
  settings: BenchSettings, names: tuple[str, ...]
) -> Iterator[BenchFigure]:
  """Measures codecs by themselves, with Gaussian values."""
  values = settings.pick(16 << 20, 1 << 16)
  x = np.random.default_rng(0).standard_normal(values, np.float32)
  copy, speed = copying(values), gb_per_s(x.nbytes)
  for name in names:
    chosen = codec.make_codec(name)
    data = chosen.encode(x)
    calls = {
      'encode': functools.partial(chosen.encode, x),
      'decode': functools.partial(chosen.decode, data, values),
    }
    for what, call in calls.items():
      # This thread's: others of the process may be at work.
      yield Comparison(
        f'{name} {what}', 'GB/s', speed, call, copy, COPY_OF_VALUES, 5,
        time.thread_time,
      ).measure()  # fmt: skip
    yield BenchFigure(
      f'{name} size', data.nbytes / values, 'B/value',
      data.nbytes / x.nbytes, 'f32',
    )  # fmt: skip
    error = np.linalg.norm(chosen.decode(data, values) - x) / np.linalg.norm(x)
    yield BenchFigure(f'{name} relative error', float(error), '')


# The simulator and the lab.


def simulate(learners: int, steps: int) -> int:
  """Simulates steps of 1 s of each learner; returns how many in all.

  The real machines at the paper's settings (P = H = 24, τ = 2, K = 1), over
  links of 10 Gbit/s, with 10 % jitter. No event makes the syncer look at all of
  its members, so a learner-step should hardly cost more with a larger M.
  """
  config = ProtocolConfig(
    learners=learners,
    fragments=FRAGMENTS,
    sync_every_steps=FRAGMENTS,
    overlap_steps=2,
    quorum=1,
    grace_safety=0.8,
    grace_cap_steps=1.0,
    admission='latest',
    max_staleness_versions=4,
    weighting='tokens',
    patience=1.0,
    total_steps=10**9,
    blend='overwrite',
  )
  network = Network(
    up_bytes=(1e8,) * FRAGMENTS,
    down_bytes=(1e8,) * FRAGMENTS,
    full_bytes=(8e8,) * FRAGMENTS,
    state_bytes=6e10,
    learner_bps=1e10,
    latency_s=0.01,
    encode_s=0.02,
    merge_s=0.05,
  )
  machines = Fleet((1.0,) * learners, tokens=1 << 20, jitter=0.1)
  return fleet.run(
    config, machines, network, FaultEvents(), 0, until_s=float(steps)
  ).steps


def measure_simulator(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures a learner-step by M, in CPU time of one thread."""
  alone_us = None
  for learners in settings.pick((1, 16, 64, 256), (1, 2)):
    began_s = time.process_time()
    least, most = settings.pick((FRAGMENTS, 4000), (4, 64))
    steps = simulate(learners, max(least, most // learners))
    each_us = 1e6 * (time.process_time() - began_s) / steps
    name, against = f'M = {learners}', 'a learner-step with M = 1'
    if alone_us is None:
      alone_us = each_us
      yield BenchFigure(name, each_us, 'µs')
    else:
      yield BenchFigure(name, each_us, 'µs', each_us / alone_us, against)


def measure_lab(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures a step of one learner in the lab beside a plain one, in wall time.

  Learners of 131 k parameters, alternating with plain steps on the same
  batches, in one process. `XLA_FLAGS=--xla_cpu_multi_thread_eigen=false` gives
  the times of a sweep, whose runs have one thread each.
  """
  config = get_config()
  config.model.update(
    layers=2, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=192
  )
  config.model.update(settings.pick({}, {'layers': 1, 'd_model': 32}))
  config.data.update(seq_len=settings.pick(64, 16))
  config.protocol.update(learners=LAB_LEARNERS, total_steps=10**6)
  run_spec = make_run_spec(run_config.build(config))
  device = Device(run_spec)
  cluster = Cluster(
    run_spec.config.protocol,
    Timing(dict.fromkeys(range(LAB_LEARNERS), 1.0), jitter=0.05),
    seed=0,
    contents=ArrayBackend(run_spec, device),
    options=ClusterOptions(tokens_per_step=device.tokens_per_step),
  )
  for learner in range(LAB_LEARNERS):
    cluster.start(learner)
  state = [0, *device.init(run_spec.initial_parameters())]
  dataset = run_spec.dataset(0)

  def plain():
    for _ in range(FRAGMENTS):
      position, params, inner = state
      batch = device.put_batch(dataset[position])
      state[1], state[2], metrics = device.step(
        params, inner, batch, 1e-3, (0, position)
      )
      float(metrics['loss'])
      state[0] += 1

  yield Comparison(
    f'a learner-step, M = {LAB_LEARNERS}',
    'ms',
    lambda seconds: 1e3 * seconds / (LAB_LEARNERS * FRAGMENTS),
    # One cycle of fragments of each learner; steps take 1 s of its clock.
    lambda: cluster.run(cluster.sim.now + FRAGMENTS),
    plain,
    'a plain step',
    settings.pick(6, 1),
    time.perf_counter,
    times=LAB_LEARNERS,
  ).measure()


HOSTS = 'hosts'  # The row that `diloco plan` knows hosts from.
ROWS = {
  'stall': BenchRow(
    'stall of a step by syncing, compute as a sleep',
    process_rows.measure_stall,
    120.0,
  ),
  'checkpoint': BenchRow(
    "stall of a learner's step by its own checkpoint",
    process_rows.measure_saving,
    150.0,
  ),
  'return': BenchRow(
    "stall of a learner's step while the syncer comes back",
    process_rows.measure_return,
    60.0,
  ),
  'blocking': BenchRow(
    'round trip that a step waits for at τ = 0',
    process_rows.measure_blocking,
    40.0,
  ),
  'bytes': BenchRow(
    'bytes at the sockets, each full sync', process_rows.measure_bytes, 20.0
  ),
  'decoder': BenchRow(
    'step of a small decoder, with and without syncing',
    process_rows.measure_decoder,
    40.0,
  ),
  'memory': BenchRow(
    "the syncer's memory, by parameter", process_rows.measure_memory, 40.0
  ),
  'long': BenchRow(
    'memory and times: the last third of a run beside its first',
    process_rows.measure_long,
    140.0,
  ),
  'round': BenchRow(
    "the syncer's round and its parts, on one core", measure_round, 30.0
  ),
  HOSTS: BenchRow(
    'what hosts do with a fragment, for `diloco plan`', measure_hosts, 20.0
  ),
  'int4': BenchRow(
    'the codec of the wire, on one core',
    lambda settings: measure_codecs(settings, (WIRE,)),
    10.0,
  ),
  'codecs': BenchRow(
    'the other codecs, on one core',
    lambda settings: measure_codecs(
      settings, tuple(name for name in codec.CODECS if name != WIRE)
    ),
    20.0,
  ),
  'lab': BenchRow('a step in the lab', measure_lab, 20.0),
  'simulator': BenchRow(
    'a simulated learner-step, by the number of learners',
    measure_simulator,
    20.0,
  ),
  'start': BenchRow('start of the processes', process_rows.measure_start, 20.0),
}
