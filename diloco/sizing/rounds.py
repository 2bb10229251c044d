# SPDX-License-Identifier: Apache-2.0
"""Simulates the rounds of learners whose steps take unlike times, as text.

The machines are those of a run. Their times are the planner's: steps by their
FLOPs, hosts by `host_speeds.json`. Imports no jax.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from diloco.config.hardware import Topology
from diloco.config.run_config import RunConfig
from diloco.fleets.fleet import DecoupledFleet, Fleet
from diloco.metrics import ages
from diloco.models.flops import StepFlops, step_flops
from diloco.models.kinds import sizes_of
from diloco.simulator.network import Network
from diloco.sizing import memory, planner
from diloco.sizing.memory import count

JITTER = 0.05  # Standard deviation of a step's length, as a share of it.
LEARNER_STEPS = 2000  # So many are simulated: some seconds.
FIRST_SHARE = 0.25  # Of them, before anything is counted.
FOREVER_STEPS = 10**9
COUNTS = 'tokens', 'stepping_s', 'merged', 'merged_tokens', 'weight'
LEGEND = """\
  of all: share of the tokens; steps: time in steps; rounds: closed ones that
  merged it; age: of its offers when merged, in its steps; merged: of its
  tokens; weight: of the kind in a merge, on average"""

# A kind: ids of its learners, their configuration, the slice of each.
Kind = tuple[Sequence[int], RunConfig, Topology]


def lines(
  config: RunConfig, kinds: Sequence[Kind], gbps: float, latency_s: float
) -> Iterator[str]:
  """Yields what the rounds make of each kind, in lines of 80 columns.

  Args:
    kinds: each learner from 0 to M - 1 is of one; larger ids are left out.
    gbps: of a learner's link, each way.
    latency_s: from a learner to the syncer, one way.
  """
  protocol, learners = config.protocol, range(config.protocol.learners)
  if sizes_of(config.model) is None:
    yield "rounds are not simulated: FLOPs of a model of one's own are unknown"
    return
  flops, steps_s = {}, {}
  for ids, own, slice_ in kinds:
    flops |= dict.fromkeys(ids, _flops(own))
    steps_s |= dict.fromkeys(ids, step_s(own, slice_))
  run = DecoupledFleet(
    dataclasses.replace(protocol, total_steps=FOREVER_STEPS),
    Fleet(
      tuple(steps_s[i] for i in learners),
      tuple(flops[i].tokens for i in learners),
      JITTER,
    ),
    _network(config, gbps, latency_s),
    config.seed,
  )
  for learner in learners:
    run.join(learner)
  until_s = LEARNER_STEPS / sum(1 / steps_s[i] for i in learners)
  run.run(FIRST_SHARE * until_s)
  run.count_anew()
  run.run(until_s)
  counted_s, rounds = (1 - FIRST_SHARE) * until_s, run.rounds
  yield (
    f'the rounds, simulated: steps at {100 * planner.MFU:.0f} % MFU ± '
    f'{100 * JITTER:.0f} %, links of {gbps:g} Gbit/s each way,'
  )
  yield (
    f'{1e3 * latency_s:g} ms; P = {protocol.fragments}, H = '
    f'{protocol.sync_every_steps}, τ = {protocol.overlap_steps}, K = '
    f'{protocol.quorum}, grace ≤ {protocol.grace_cap_steps:g} T'
  )
  if not rounds:
    yield f'  none closes within {until_s:.3g} s, {LEARNER_STEPS} steps of all'
    return
  yield (
    f'  {"learners":18}{"T, s":>7}{"tokens/s":>9}{"of all":>8}{"steps":>7}'
    f'{"rounds":>8}{"age":>5}{"merged":>8}{"weight":>8}'
  )
  for ids, config_of, slice_ in kinds:
    if not (own := [run.tally.count(i) for i in ids if i in learners]):
      continue
    tokens, stepping_s, merges, merged, weight = (
      sum(getattr(x, name) for x in own) for name in COUNTS
    )
    age = ages.total(x.ages for x in own).mean_steps or 0.0
    name = slice_.name
    if config_of.mesh.slices > 1:
      name = f'{config_of.mesh.slices}x{name}'
    yield (
      f'  {f"{len(own)} of {name}":18}{steps_s[ids[0]]:7.3g}'
      f'{count(tokens / counted_s):>9}{tokens / run.tally.tokens:8.0%}'
      f'{stepping_s / len(own) / counted_s:7.0%}'
      f'{merges / len(own) / rounds:8.0%}{age:5.1f}'
      f'{merged / tokens / protocol.fragments:8.0%}{weight / rounds:8.0%}'
    )
  yield from LEGEND.splitlines()
  pace_s = counted_s / (rounds * protocol.spacing_steps)
  yield (
    f'  {count(run.tally.tokens / counted_s)} tokens/s of all; t rises each '
    f'{pace_s:.3g} s, to {protocol.total_steps:,} in '
    f'{protocol.total_steps * pace_s / planner.HOUR_S:.3g} h'
  )


def failure_lines(
  config: RunConfig, kind: Kind, gbps: float, latency_s: float, **failures
) -> Iterator[str]:
  """Yields what a kind of learner does without a slice, and its goodput.

  Args:
    failures: `mtbi_days`, `pause_s` and `repair_s` of a `planner.Situation`.
  """
  ids, own, slice_ = kind
  learners = len([i for i in ids if i < config.protocol.learners])
  if not learners or sizes_of(own.model) is None:
    return
  plan = planner.RunPlan(
    planner.Situation(
      sum(memory.layout_of(own).sizes),
      learners,
      gbps,
      step_s=step_s(own, slice_),
      chips=learners * own.mesh.devices,
      latency_s=latency_s,
      hosts=slice_.hosts,
      slices=own.mesh.slices,
      **failures,
    )
  )
  for name, text in planner.failure_rows(plan, (plan.recovery,)):
    yield f'{name:13}{text}'


def step_s(own: RunConfig, slice_: Topology) -> float:
  """Returns the seconds of a learner's step; each slice makes a part of it."""
  return planner.step_seconds(slice_, _flops(own).total / own.mesh.slices)


def _flops(own: RunConfig) -> StepFlops:
  return step_flops(sizes_of(own.model), own.data.batch, own.data.seq_len)


def _network(config: RunConfig, gbps: float, latency_s: float) -> Network:
  """Returns links and hosts of the fragments of a decoder."""
  sizes, codec = memory.layout_of(config).sizes, config.codec
  setup = planner.Situation(
    sum(sizes), config.protocol.learners, gbps, step_s=1.0
  )
  exchange = planner.exchange_times(setup, config.protocol.fragments)
  up, down = map(codec.value_bytes, (codec.up, codec.down))
  return Network(
    *(tuple(n * each for n in sizes) for each in (up, down, memory.F32_BYTES)),
    planner.STATE_BYTES * setup.params,
    learner_bps=1e9 * gbps,
    latency_s=latency_s,
    encode_s=exchange.encode_s,
    merge_s=exchange.merge_s,
  )
