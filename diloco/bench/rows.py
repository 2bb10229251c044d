# SPDX-License-Identifier: Apache-2.0
"""The benchmarks by name.

A syncer's round, its parts, what hosts do with a fragment, codecs and the
simulator are measured in this process, most as `Comparison`s in one loop. The
syncer has its real work: it takes the bytes of M learners from memory, decodes
and checks them, merges, steps the outer optimizer, encodes the update and
offers it. Not measured: the network. GB/s are those of f32 contributions.

Stalls of steps, bytes, memory and growth are those of real processes. The twin
without syncing is the same processes with H so long that no round becomes due.
Where steps are slept out, a sleep stands for accelerators at work.
"""

import functools
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.bench.measurement import (
  BenchFailed,
  BenchFigure,
  BenchRow,
  BenchSettings,
  Comparison,
  duration,
  quantile,
)
from diloco.bench.real_run import (
  NEVER,
  SYNCER,
  RealRun,
  bowl,
  column,
  get_config,
  status,
  step_seconds,
)
from diloco.config import run_config
from diloco.config.sections import CheckpointConfig, defaults
from diloco.fleets import fleet
from diloco.fleets.failures import FaultEvents
from diloco.fleets.fleet import Fleet
from diloco.learner import own_loop
from diloco.learner.programs import StepPrograms
from diloco.metrics import names
from diloco.metrics.workdir import learner_name
from diloco.models.flops import step_flops
from diloco.numerics import codec, merge, outer, payload
from diloco.protocol import shard_messages as orders
from diloco.protocol.config import ProtocolConfig
from diloco.run import payload_parts
from diloco.run.payload_parts import announced
from diloco.run.spec import RunSpec, decoder_config, make_run_spec
from diloco.simulator.network import Network
from diloco.syncer.shard import Shard
from diloco.transport.memory import MemoryNetwork, MemoryPlane

COPY = 'a copy of the contributions in f32'
COPY_OF_VALUES = 'a copy of the f32 values'
FEW, MANY = 2, 8  # Learners of a round.
WIRE = 'int4'  # The default of both directions.
FRAGMENTS = 24  # Of the simulator.
LAB_STEPS, PRODUCT = 4, 256
OWN_LAYERS, OWN_ROWS = 16, 2048
SLICES, SLICE_KILLS = 3, 8
PAUSES = 'slices'
LOSS, RETURN = ', loss', ', return'  # Figures of that row.
# That of the lab's studies, and one of twice its width.
LAB_MODELS = {
  name: {
    'model.kind': 'decoder', 'model.layers': 2, 'model.d_model': width,
    'model.heads': width // 16, 'model.kv_heads': width // 32,
    'model.head_dim': 16, 'model.d_ff': 3 * width, 'data.seq_len': 64,
  }
  for name, width in (('131 k', 64), ('459 k', 128))
}  # fmt: skip


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
    self._shard.perform(orders.OfferPart(job, job, p, to))

  def _next_job(self) -> int:
    self._job += 1
    return self._job

  def _take(self, kind: type):
    answer = self._answers.get()
    if isinstance(answer, BaseException):
      raise answer
    assert isinstance(answer, kind), answer


class Stages:
  """The work of hosts on the largest fragment of a model, as calls."""

  def __init__(self, run_spec: RunSpec):
    pieces = max(
      run_spec.layout.fragments, key=lambda xs: sum(x.size for x in xs)
    )
    up, down = run_spec.up, run_spec.down
    vs = {
      m: _noise(pieces, m) for m in range(run_spec.config.protocol.learners)
    }
    datas = [payload.encode(v, pieces, up) for v in vs.values()]
    pulled = {m: payload.inspect(d, pieces, up) for m, d in enumerate(datas)}
    weights = dict.fromkeys(vs, 1 / len(vs))
    optimizer = run_spec.outer
    theta, other = vs[0], vs[len(vs) - 1]
    state = outer.init(theta, optimizer)
    delta = merge.merge(vs, weights, pieces)
    _, update = outer.step(state, delta, optimizer, down, pieces)
    self.values = sum(x.size for x in pieces)
    self.syncer = {
      'checks and norms': lambda: [
        payload_parts.checked(payload.inspect(d, pieces, up)) for d in datas
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
      'encode': lambda: payload_parts.encode(theta, other, pieces, up),
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
  comparison = Comparison(
    name,
    unit,
    lambda s: learners * s / gb if in_seconds else gb / s,
    rounds.run,
    copying(rounds.values),
    COPY,
    settings.pick(4, 1),
  ).measure()
  rounds.close()
  return comparison


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


# The simulator.


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
    blend='replace',
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
  machines = Fleet((1.0,) * learners, (1 << 20,) * learners, jitter=0.1)
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


# Real processes.

Overrides = Mapping[str, object]
Steps = list[list[dict]]  # By learner, records of its steps.


def every(steps: int, overlap: int, fragments: int = 4) -> Overrides:
  """Returns H, τ and P."""
  return {
    'protocol.fragments': fragments,
    'protocol.sync_every_steps': steps,
    'protocol.overlap_steps': overlap,
  }


TWIN = 'the same without syncing'
WITHOUT = {'protocol.sync_every_steps': NEVER}
EVERY_8, EVERY_20, EVERY_24 = every(8, 2), every(20, 4), every(24, 6)
SMALL_DECODER = {
  'model.layers': 2,
  'model.d_model': 128,
  'model.heads': 4,
  'model.kv_heads': 2,
  'model.head_dim': 32,
  'model.d_ff': 256,
}
SMALL_PARAMETERS = 361_088
SAVE = 'checkpoint.learner_every_steps'
QUANTILES = {'longest': 1.0, 'p99': 0.99, 'median': 0.5}
EMPTY_MILLIONS = 0.00144  # Layers of 12 × 12: what four hosts can share.
HOSTS_OF_ONE = 4  # Of a learner, in the row `memory`.
SAMPLES = 300  # Of memory, in the row `long`,
WARM_UP = 1 / 12  # and what of it is left out: compiling, allocators, pools.


# Steps with and without something.


def _steps(
  overrides: Overrides, floors_s: list[float], count: int, rounds: int
) -> Steps:
  """Returns `count` steps of each learner, after `rounds` rounds with each.

  Raises:
    BenchFailed: learners were to save, and one has no checkpoint at the end.
  """
  learners = range(len(floors_s))
  with RealRun({'protocol.learners': len(floors_s), **overrides}) as run:
    run.start_syncer()
    for m, floor_s in enumerate(floors_s):
      run.start_learner(m, step_floor_s=floor_s)
    for m in learners:
      run.until_steps(m, 5)
      run.until_merged(m, rounds)
    # All of them at the same time.
    before = [len(run.steps(m)) for m in learners]
    for m, begin in enumerate(before):
      run.until_steps(m, max(begin + count - len(run.steps(m)), 0))
    for m in learners if SAVE in overrides else ():
      if not list(run.workdir.checkpoints(learner_name(m)).glob('[0-9]*')):
        raise BenchFailed(f'learner {m} has no checkpoint')
    return [
      run.steps(m)[begin : begin + count] for m, begin in enumerate(before)
    ]


def _with_and_without(
  overrides: Overrides, floors_s: list[float], count: int, rounds: int
) -> tuple[Steps, Steps]:
  without = _steps({**overrides, **WITHOUT}, floors_s, count, 0)
  return _steps(overrides, floors_s, count, rounds), without


def all_seconds(steps: Steps) -> list[float]:
  return [s for each in steps for s in step_seconds(each)]


def stalls(
  name: str, steps: Steps, twin: Steps, against: str, titles: Sequence[str]
) -> Iterator[BenchFigure]:
  """Yields quantiles of the step time beyond the twin's median step."""
  steps_s, twin_s = all_seconds(steps), all_seconds(twin)
  for title in titles:
    share = QUANTILES[title]
    yield duration(
      f'{name}, {title} step stall',
      'ms',
      quantile(steps_s, share),
      quantile(twin_s, share),
      against,
      beyond_s=quantile(twin_s, 0.5),
    )


def measure_stall(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures stalls of two learners whose computation is a sleep, by size."""
  for millions in settings.sizes:
    synced, alone = _with_and_without(
      {**EVERY_20, **bowl(millions)},
      2 * [sleep_s(millions)],
      settings.pick(100, 10),
      settings.pick(8, 1),
    )
    name = f'{millions:g} M'
    yield from stalls(name, synced, alone, TWIN, tuple(QUANTILES))
    boundary_s = max(s for e in synced for s in column(e, names.STALL_TIME))
    usual_s = quantile(all_seconds(alone), 0.5)
    yield duration(
      f'{name}, longest boundary', 'ms', boundary_s, usual_s, 'a step'
    )


def sleep_s(millions: float) -> float:
  """Returns how long a step of such a model is slept out."""
  return 0.03 + 0.02 * millions


def measure_saving(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures stalls of learners that save, by size.

  First with computation as a sleep, then with steps that keep the cores busy;
  the same syncing without saves is the reference.
  """
  count, saves = settings.pick((120, 40), (10, 5))
  kinds = {'compute as a sleep': sleep_s, 'cores busy': lambda millions: 0.0}
  for kind, floor_s in kinds.items():
    for millions in settings.sizes:
      saving, without = (
        _steps(
          {**EVERY_20, **bowl(millions), **more},
          2 * [floor_s(millions)],
          count,
          settings.pick(8, 1),
        )
        for more in ({SAVE: saves}, {})
      )
      name = f'{millions:g} M, {kind}'
      against, titles = 'the same without saves', ('longest', 'p99')
      yield from stalls(name, saving, without, against, titles)


def measure_decoder(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures the step of a real decoder with and without syncing, M = 1."""
  overrides = {**EVERY_24, **SMALL_DECODER, 'data.batch': 16}
  overrides['data.seq_len'] = 64
  synced, alone = _with_and_without(
    overrides, [0.0], settings.pick(200, 20), settings.pick(8, 1)
  )
  steps_s, twin_s = all_seconds(synced), all_seconds(alone)
  for name, f in (('mean', statistics.mean), ('median', statistics.median)):
    yield duration(f'{name} step', 'ms', f(steps_s), f(twin_s), TWIN)


def measure_step(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures inner steps of the lab's models beside a product of their FLOPs.

  Rows are those of a learner, and of data-parallel for four of them.
  """
  rng = np.random.default_rng(0)
  for name, model in LAB_MODELS.items():
    for rows in settings.pick((8, 32), (8,)):
      raw = get_config()
      raw.update_from_flattened_dict({**model, 'data.batch': rows})
      run_spec = make_run_spec(run_config.build(raw), reads_text=False)
      programs = StepPrograms(run_spec, jax.devices()[:1])
      tokens = rng.integers(0, 256, (rows, raw.data.seq_len + 1), np.int32)
      batch = programs.put_batch({'tokens': tokens})
      state = [*programs.draw()]

      def step(programs=programs, state=state, batch=batch):
        for i in range(LAB_STEPS):
          *state[:], _ = programs.step(*state, batch, 1e-3, (0, i))
        jax.block_until_ready(state)

      sizes, length = decoder_config(run_spec.config), raw.data.seq_len
      flops = step_flops(sizes, rows, length).total
      count = tokens[:, 1:].size * LAB_STEPS
      matrix = np.ones((PRODUCT, PRODUCT), np.float32)
      times = round(LAB_STEPS * flops / (2 * PRODUCT**3))

      def product(matrix=matrix, times=times):
        for _ in range(times):
          np.dot(matrix, matrix)

      yield Comparison(
        f'{name} parameters, {rows} rows',
        'µs a token',
        lambda seconds, count=count: 1e6 * seconds / count,
        step,
        product,
        'products of as many FLOPs',
        settings.pick(9, 2),
      ).measure()


def _start_both(run: RealRun, rounds: int):
  """Starts a syncer and two learners; waits for rounds with each."""
  run.start_syncer()
  for m in (0, 1):
    run.start_learner(m)
  for m in (0, 1):
    run.until_merged(m, rounds)


def measure_return(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures the longest step while a syncer that was killed comes back.

  It has saved its ledger alone, so the learners give it whole fragments.
  """
  for millions in settings.sizes:
    floor_s = sleep_s(millions)
    model = {**bowl(millions), 'run.step_floor_s': floor_s}
    with RealRun({**EVERY_20, **model}) as run:
      _start_both(run, settings.pick(8, 1))
      before = [run.steps(m) for m in (0, 1)]
      run.kill(SYNCER)
      closed = len(run.closes())
      run.start_syncer()
      more = settings.pick(8, 1)
      run.until(lambda n=closed + more: len(run.closes()) >= n, 'it closes')
      after = [run.steps(m)[len(before[m]) :] for m in (0, 1)]
    usual_s = quantile(all_seconds(before), 0.5)
    yield duration(
      f'{millions:g} M, longest step stall',
      'ms',
      max(all_seconds(after)),
      usual_s,
      'the median step before',
      beyond_s=usual_s,
    )


def measure_slices(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures how long a learner stands that loses a slice, or has one back.

  It has three of one host each, and no peer. They are killed one after the
  other, each once the one before is back. The first world of two slices
  compiles its programs; all others find theirs.
  """
  away_s = settings.pick(15.0, 10.0)
  for millions in settings.sizes:
    overrides = {
      **EVERY_24,
      **bowl(millions),
      'protocol.learners': 1,
      'mesh.slices': SLICES,
      'data.batch': 2 * SLICES,
      'data.shards': 1,
      'run.step_floor_s': 0.05,
      'run.restart_delay_s': away_s,
    }
    with RealRun(overrides) as run:
      run.start_launcher()
      lost_s, back_s = [], []
      for kill in range(settings.pick(SLICE_KILLS, 2)):
        # Who stands by for the next world has imported everything by then.
        run.until_steps(0, settings.pick(240, 4))
        killed_s = run.kill_of_launcher(learner_name(0, kill % SLICES))
        first, between, back = _worlds_after(run, killed_s)
        lost_s.append(first[names.TIME] - killed_s)
        if between:  # Otherwise the slice was back before the first step.
          back_s.append(back[names.TIME] - between[-1][names.TIME])
      lost = run.reformings()
    if not back_s:
      raise BenchFailed(f'no step in the {away_s:g} s without a slice')
    title = f'{millions:g} M, {SLICES} slices of a host'
    yield BenchFigure(f'{title}, first loss', lost_s[0], 's')
    yield BenchFigure(f'{title}{LOSS}', statistics.median(lost_s[1:]), 's')
    yield BenchFigure(f'{title}, longest of them', max(lost_s[1:]), 's')
    yield BenchFigure(f'{title}{RETURN}', statistics.median(back_s), 's')
    yield BenchFigure(
      f'{title}, steps lost, at most', max(x['lost_steps'] for x in lost), ''
    )


def _worlds_after(
  run: RealRun, killed_s: float
) -> tuple[dict, list[dict], dict]:
  """Waits until a slice of learner 0 that was killed takes part again.

  Returns:
    The first step after it was killed; the steps made without it; the first one
    with it.
  """

  def of_whole() -> list[dict]:
    whole = [
      line[names.INCARNATION]
      for line in run.reformings()
      if line['slices'] == SLICES and line['time_s'] > killed_s
    ]
    return [x for x in run.steps(0) if x[names.INCARNATION] in whole]

  run.until(lambda: bool(of_whole()), 'the slice of learner 0 is back')
  back = of_whole()[0]
  old = {
    x[names.INCARNATION] for x in run.steps(0) if x[names.TIME] <= killed_s
  }
  between = [
    x
    for x in run.steps(0)
    if x[names.INCARNATION] not in old and x[names.TIME] < back[names.TIME]
  ]
  return (between or [back])[0], between, back


def measure_bytes(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures TCP payload per parameter and full sync, control plane included.

  Learners count all of their sockets. Between two records, n rounds merged the
  learner: n / P syncs of all parameters up; all rounds came down.
  """
  with RealRun({**EVERY_24, **SMALL_DECODER}) as run:
    _start_both(run, settings.pick(8, 2))
    begin, closed = run.steps(0)[-1], len(run.closes())
    more = settings.pick(48, 8)
    run.until(lambda: len(run.closes()) >= closed + more, 'rounds close')
    end = run.steps(0)[-1]
    rounds = {'up': run.closes(0), 'down': run.closes()}
  if names.SOCKET_SENT not in end:
    raise BenchFailed('this system does not count the bytes of sockets')
  scalars = {'up': names.SOCKET_SENT, 'down': names.SOCKET_RECEIVED}
  coded = codec.make_codec('int4').nbytes(1 << 20) / (1 << 20)
  for leg, scalar in scalars.items():
    carried = sum(
      begin[names.TIME] < close['time_s'] <= end[names.TIME]
      for close in rounds[leg]
    )
    each = (end[scalar] - begin[scalar]) * EVERY_24['protocol.fragments']
    each /= max(carried, 1) * SMALL_PARAMETERS
    yield BenchFigure(
      f'{leg}, each sync', each, 'B/parameter', each / coded,
      'int4 with its scales',
    )  # fmt: skip


def measure_memory(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures peaks of resident memory beyond that of an empty model.

  The syncer's while it writes its ledger alone, then with its usual saves. Then
  those of a learner that saves, with Θ and moments in one host or in four.
  """
  usual = defaults(CheckpointConfig)['syncer_every_rounds']
  saving = {'checkpoint.syncer_every_rounds': usual}

  def of_syncer(millions: float, saves: Mapping, rounds: int) -> int:
    overrides = {**EVERY_8, 'run.step_floor_s': 0.05, **bowl(millions), **saves}
    with RealRun(overrides) as run:
      _start_both(run, settings.pick(rounds, 2))
      return run.peak_bytes(SYNCER)

  def of_host(millions: float, hosts: int) -> int:
    # With steps too short for a round, each offer that waits keeps a copy.
    overrides = {
      **EVERY_8,
      **bowl(millions),
      'run.step_floor_s': sleep_s(millions),
      'protocol.learners': 1,
      'mesh.fsdp': hosts,
      SAVE: 20,
    }
    with RealRun(overrides) as run:
      run.start_syncer()
      run.start_learner(0, hosts)
      run.until_steps(0, settings.pick(60, 2))
      return max(run.peak_bytes(learner_name(0, each)) for each in range(hosts))

  def beyond(peak_of: Callable, *args) -> Iterator[tuple[float, float]]:
    empty_bytes = peak_of(EMPTY_MILLIONS, *args)
    for millions in settings.sizes:
      peak = max(peak_of(millions, *args) - empty_bytes, 0)
      yield millions, peak / (millions * 1e6)

  for words, saves, rounds in (('', {}, 12), (', saving', saving, 3 * usual)):
    for millions, each in beyond(of_syncer, saves, rounds):
      name = f'{millions:g} M, M = 2{words}'
      yield BenchFigure(name, each, 'B/parameter', each / 4, 'Θ in f32')
  alone = dict(beyond(of_host, 1))
  for millions, each in alone.items():
    yield BenchFigure(
      f'{millions:g} M, a learner, saving', each, 'B/parameter',
      each / 12, 'Θ and moments in f32',
    )  # fmt: skip
  for millions, each in beyond(of_host, HOSTS_OF_ONE):
    yield BenchFigure(
      f'{millions:g} M, each of its {HOSTS_OF_ONE} hosts', each, 'B/parameter',
      each / alone[millions], 'the learner of one host',
    )  # fmt: skip


def measure_long(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Compares the last third of a run with its first: memory, steps, rounds.

  Two learners whose computation is a sleep, with the usual checkpoints. What
  grows in some minutes shows as a ratio above 1; a slow leak takes an hour.
  """
  millions, span_s = settings.sizes[-1], settings.pick(60 * settings.minutes, 6)
  usual = defaults(CheckpointConfig)
  overrides = {
    **EVERY_20,
    **bowl(millions),
    'run.step_floor_s': sleep_s(millions),
    SAVE: usual['learner_every_steps'],
    'checkpoint.syncer_every_rounds': usual['syncer_every_rounds'],
  }
  with RealRun(overrides) as run:
    _start_both(run, 1)
    began_s = time.time()
    memory = {name: [] for name in run.processes}
    for i in range(1, SAMPLES + 1):
      due_s = began_s + span_s * i / SAMPLES
      run.until(lambda due_s=due_s: time.time() >= due_s, 'the next sample')
      for name, process in run.processes.items():
        mb = 1024 * status(process.pid, 'VmRSS') / 1e6
        memory[name].append((time.time(), mb))
    points = {
      (f'{name}, memory', 'MB', 0.5): seen for name, seen in memory.items()
    }
    for m in (0, 1):
      seen = [(x[names.TIME], 1e3 * x[names.STEP_TIME]) for x in run.steps(m)]
      for title in ('median', 'p99'):
        name = f'{learner_name(m)}, {title} step'
        points[name, 'ms', QUANTILES[title]] = seen
    seen = [(close['time_s'], 1e3 * close['sync_s']) for close in run.closes()]
    points['median round', 'ms', 0.5] = seen
  for (name, unit, share), seen in points.items():
    yield growth(name, unit, share, seen, began_s, span_s)


def growth(
  name: str,
  unit: str,
  share: float,
  points: Sequence[tuple[float, float]],
  began_s: float,
  span_s: float,
) -> BenchFigure:
  """Returns a quantile of the last third of a span beside that of the first.

  Args:
    points: times and values.

  Raises:
    BenchFailed: nothing was measured in one of the thirds.
  """
  warm_s = began_s + WARM_UP * span_s
  third_s = (began_s + span_s - warm_s) / 3
  first, last = (
    [v for t, v in points if begin_s <= t < begin_s + third_s]
    for begin_s in (warm_s, warm_s + 2 * third_s)
  )
  if not first or not last:
    raise BenchFailed(f'{name}: too few; give more --minutes')
  first, last = quantile(first, share), quantile(last, share)
  against = 'the first third'
  return BenchFigure(f'{name}, last third', last, unit, last / first, against)


HOSTS = 'hosts'  # The row that `diloco plan` knows hosts from.


def measure_own_loop(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures what `Learner.boundary` costs a loop that is not ours.

  A step is 16 products of 2,048 rows, as of the recipe's tokens a step, with
  250 × 250 matrices, and their gradient.
  """
  keys = jax.random.split(jax.random.key(0), OWN_LAYERS)
  width = round((1e6 / OWN_LAYERS) ** 0.5)
  x = jax.random.normal(keys[0], (OWN_ROWS, width))

  def loss_of(params, x):
    for weights in params:
      x = jnp.tanh(x @ weights)
    return jnp.mean(jnp.square(x))

  @jax.jit
  def step(params, x):
    loss, gradient = jax.value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), loss

  def initial():
    return [jax.random.normal(key, (width, width)) * 0.06 for key in keys]

  steps = settings.pick(30, 12)
  alone = initial()

  def unsynced():
    nonlocal alone
    last = None
    for _ in range(steps):
      alone, loss = step(alone, x)
      if last is not None:  # As a learner reads it: with a step queued.
        last.block_until_ready()
      last = loss
    last.block_until_ready()

  for name, every in (('by defaults', 24), ('with nothing due', 24 * 10**6)):
    sync = own_loop.Sync(every=every, learners=1, steps=10**6)
    boundaries_s = []
    with (
      tempfile.TemporaryDirectory() as folder,
      own_loop.start_syncer(folder, initial(), sync) as syncer,
      own_loop.Learner(
        syncer.address, initial(), learner=0, sync=sync, workdir=folder
      ) as learner,
    ):
      held = [*learner.start()]

      def synced(held=held, learner=learner, boundaries_s=boundaries_s):
        for _ in range(steps):
          params, loss = step(held[0], x)
          began_s = time.thread_time()
          held[:] = learner.boundary(params, (), tokens=OWN_ROWS, loss=loss)
          boundaries_s.append(time.thread_time() - began_s)

      yield Comparison(
        f'a step of 1 M, {name}',
        'ms',
        lambda seconds: 1e3 * seconds / steps,
        synced,
        unsynced,
        'the same step without',
        settings.pick(7, 2),
      ).measure()
    yield BenchFigure(
      f'the boundary alone, {name}',
      1e3 * statistics.median(boundaries_s),
      'ms of CPU',
    )


ROWS = {
  'stall': BenchRow(
    'stall of a step by syncing, compute as a sleep', measure_stall, 120.0
  ),
  'checkpoint': BenchRow(
    "stall of a learner's step by its own checkpoint", measure_saving, 150.0
  ),
  'return': BenchRow(
    "stall of a learner's step while the syncer comes back",
    measure_return,
    60.0,
  ),
  PAUSES: BenchRow(
    'how long a learner stands that loses a slice', measure_slices, 500.0
  ),
  'bytes': BenchRow(
    'bytes at the sockets, each full sync', measure_bytes, 20.0
  ),
  'decoder': BenchRow(
    'step of a small decoder, with and without syncing', measure_decoder, 40.0
  ),
  'step': BenchRow(
    "an inner step of the lab's models, by rows", measure_step, 30.0
  ),
  'own_loop': BenchRow(
    "a boundary in a loop of one's own", measure_own_loop, 20.0
  ),
  'memory': BenchRow(
    "the syncer's memory and a learner's, by parameter", measure_memory, 160.0
  ),
  'long': BenchRow(
    'memory and times: the last third of a run beside its first',
    measure_long,
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
  'simulator': BenchRow(
    'a simulated learner-step, by the number of learners',
    measure_simulator,
    20.0,
  ),
}
