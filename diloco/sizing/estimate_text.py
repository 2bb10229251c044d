# SPDX-License-Identifier: Apache-2.0
"""Formats an estimate as text of 80 columns."""

import textwrap
from collections.abc import Iterator

from diloco.sizing import host_memory, syncer_machine
from diloco.sizing.estimate import Estimate
from diloco.sizing.host_memory import count, in_bytes, rounds

WIDTH = 80
MFU = 0.4  # What well-tuned dense training reaches.


def lines(found: Estimate) -> Iterator[str]:
  """All that is to be said, line by line."""
  yield from _given(found)
  yield ''
  yield from _chip(found)
  yield ''
  yield from _hosts(found)
  yield ''
  yield from _arithmetic(found)


def _given(found: Estimate) -> Iterator[str]:
  model, data, mesh = found.config.model, found.config.data, found.config.mesh
  yield (
    f'{found.config.name}: {count(found.parameters)} parameters, '
    f'{model.kind}, {model.dtype}, remat {model.remat}'
  )
  parts = found.config.inner.accumulate
  yield (
    f'a step of {data.batch} · {data.seq_len} tokens in {parts} '
    f'part{"s" if parts > 1 else ""}; mesh fsdp {mesh.fsdp} · expert '
    f'{mesh.expert} · tensor {mesh.tensor}'
  )
  yield from _wrapped(f'for {found.where}')
  yield from _wrapped(f'by {found.compiler}')


def _chip(found: Estimate) -> Iterator[str]:
  memory, ahead = found.chip_memory, found.config.protocol.inflight_max
  yield 'memory of a chip'
  yield _row('parameters, f32', memory.parameters)
  yield _row('inner state', memory.inner_state)
  yield _row('batch, and code of the step', memory.batch + memory.code)
  yield _row('gradients, activations: XLA temporaries', memory.temporaries)
  yield _row(f'snapshots, {rounds(ahead)} in flight', memory.snapshots)
  yield _row('fragments of Θ that have arrived', memory.arrived)
  yield _row('a blend, while it runs', memory.exchange_temporaries)
  yield _row('all', memory.total)
  if found.chip is not None:
    share = memory.total / found.chip.hbm_bytes
    fits = 'it fits' if found.fits else 'IT DOES NOT FIT'
    yield (
      f'  {fits}: {100 * share:.0f} % of the {in_bytes(found.chip.hbm_bytes)} '
      f'of a {found.chip.name}'
    )
  yield (
    '  the largest array of the exchange has '
    f'{in_bytes(memory.largest_exchanged)}, the largest shard '
    f'{in_bytes(memory.largest_shard)}'
  )
  yield _row('more, while a newcomer is given the state', memory.donation)
  yield _row('more, if there is room, to save', memory.checkpoint)


def _hosts(found: Estimate) -> Iterator[str]:
  share = found.share
  yield (
    f'a host of a learner, of {share.hosts}: N = {count(share.values)}, F = '
    f'{count(share.fragment_values)}, S = {in_bytes(share.state_bytes)}, '
    f'b = {share.value_bytes:.3f}'
  )
  yield from host_memory.lines(found.learner_memory)
  yield (
    f'  a round of it: {in_bytes(share.up_bytes)} up, '
    f'{in_bytes(share.down_bytes)} down; of a learner '
    f'{in_bytes(share.hosts * share.up_bytes)} and '
    f'{in_bytes(share.hosts * share.down_bytes)}'
  )
  yield (
    f'the syncer, M = {found.config.protocol.learners}, N = '
    f'{count(found.parameters)}'
  )
  yield from syncer_machine.lines(found.syncer)


def _arithmetic(found: Estimate) -> Iterator[str]:
  flops = found.flops
  if flops is None:
    yield "FLOPs of a model of one's own are not known by convention"
  else:
    yield (
      f'FLOPs of a step   6ND {flops.products:.3g} (N = '
      f'{count(flops.active)} that a token is multiplied'
    )
    yield (
      f'                  with), attention {flops.attention:.3g}: '
      f'{flops.total:.3g}, of a chip {flops.total / found.chips:.3g}'
    )
  yield (
    f'                  XLA counts {found.xla_flops:.3g} of a chip: the body '
    'of a loop once,'
  )
  yield '                  and what remat computes again'
  speed = found.tokens_per_s(MFU)
  if speed is not None:
    yield from _wrapped(
      f'MFU               model FLOPs (no remat, no optimizer) over '
      f'{found.chip.bf16_flops / 1e12:.0f} TFLOP/s in bf16 of a '
      f'{found.chip.name}',
      18,
    )
    yield (
      f'                  at {100 * MFU:.0f} %: {count(speed)} tokens/s of a '
      f'learner, {flops.tokens / speed:.3g} s a step'
    )


def _row(name: str, nbytes: float) -> str:
  return f'  {name:58}{in_bytes(nbytes):>10}'


def _wrapped(text: str, indent: int = 3) -> Iterator[str]:
  yield from textwrap.wrap(text, WIDTH, subsequent_indent=' ' * indent)
