# SPDX-License-Identifier: Apache-2.0
"""Memory of hosts by formula, and the machine of a syncer or of its shards.

The formulas cover one process each, excluding Python, jax and the data:
  N parameters that it holds, of the learner's N if its hosts share them;
  F of those in the largest fragment, N/P if fragments are even;
  S bytes of inner optimizer state, 8N with AdamW;
  b bytes of a value on the wire, M learners, P fragments.

`diloco.plan` prints them and launchers ask for the machine; importing this
imports no jax.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from diloco.config.run_config import RunConfig
from diloco.models.kinds import sizes_of
from diloco.numerics.fragments import Layout, TensorSpec, make_layout
from diloco.numerics.optimizers import moments_of
from diloco.numerics.shard_assignment import shards_of
from diloco.protocol.config import UPDATES_KEPT

F32_BYTES = 4
GIB = 1 << 30
# Python, jax, some hundred MB of text, two threads a learner.
PROCESS_BYTES = 4e9
# Logs, event logs, curves; the container's image, where it is the machine's
# disk.
FILES_BYTES = 30e9
KEPT = 2  # Checkpoints that stay, unless the configuration says otherwise.
# Side by side: what merges, what decodes, what connects, what saves. With ten
# learners, contributions are most of a round's work (`host_speeds.json`).
CPUS = 4
DECODES_LONGER = 10
CPUS_OF_MANY = 6
EVALUATOR_CPUS = 2


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of a host for one purpose, with the formula."""

  what: str
  formula: str
  nbytes: float


def lines(items: Iterable[Memory]) -> Iterator[str]:
  """Yields a line of text for each purpose, of at most 72 columns."""
  for item in items:
    yield f'  {item.what:40}{item.formula:20}{in_bytes(item.nbytes):>9}'


def in_bytes(nbytes: float) -> str:
  """Bytes in three digits, such as '33.6 GB'; one GB is 10⁹ bytes."""
  for unit, scale in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
    if nbytes >= scale:
      return f'{nbytes / scale:.3g} {unit}'
  return f'{nbytes:.0f} B'


def count(number: float) -> str:
  """A number in four digits, such as '12 B'; one B is 10⁹."""
  for unit, scale in (('T', 1e12), ('B', 1e9), ('M', 1e6)):
    if number >= scale:
      return f'{number / scale:.4g} {unit}'
  return f'{number:,.0f}'


def rounds(number: int) -> str:
  """Returns text such as '2 rounds'."""
  return f'{number} round' + ('s' if number > 1 else '')


def of_learner(
  n: float, f: float, s: float, b: float, ahead: int
) -> tuple[Memory, ...]:
  """See `learner/replica.py`, `hosts/host_transfer.py`, `train_state.py`.

  Args:
    ahead: rounds that may be in flight.
  """
  return (
    # Bases are the same arrays: what is applied becomes the base.
    Memory('Θ, which the bases share', '4N', F32_BYTES * n),
    # Snapshot and delta; what is decoded and what is rebuilt of an update.
    Memory(
      f'{rounds(ahead)} in flight',
      f'4·4F + {ahead + 1}·bF',
      (4 * F32_BYTES + (ahead + 1) * b) * f,
    ),
    # On CPUs a second set of buffers, kept; else the copy that is written.
    Memory('θ and its state again, to save', '4N + S', F32_BYTES * n + s),
    # Θ as bytes, the inner state, and the same in one piece.
    Memory('giving its state to a newcomer', '4N + 2S', F32_BYTES * n + 2 * s),
    Memory("taking a donor's state, once", '8N + 2S', 2 * (F32_BYTES * n + s)),
  )


def of_syncer(
  n: float, f: float, b: float, ahead: int, learners: int, moments: int = 1
) -> tuple[Memory, ...]:
  """See `syncer/outer_state.py`, `server.py`.

  Args:
    ahead: rounds that may be in flight.
    moments: arrays of N in the outer optimizer's state.
  """
  return (
    Memory(
      'Θ, outer optimizer, residual',
      f'{(2 + moments) * F32_BYTES}N',
      (2 + moments) * F32_BYTES * n,
    ),
    Memory(
      f'contributions of {rounds(ahead)}',
      f'{ahead}·M·4F',
      ahead * learners * F32_BYTES * f,
    ),
    # Δ, u, what is wanted and sent, the next Θ_p and residual.
    Memory('the outer step', '6·4F', 6 * F32_BYTES * f),
    # Until they are fetched; and where a link is too slow for the run, the last
    # of each fragment, which learners of one host share.
    Memory(
      'updates on offer',
      f'{ahead}·M·bF + {UPDATES_KEPT}·bN',
      ahead * learners * b * f + UPDATES_KEPT * b * n,
    ),
  )


# The syncer.


@dataclasses.dataclass(frozen=True)
class SyncerMachine:
  """The needs of one process of the syncer, and of what runs beside it."""

  cpus: int
  memory: tuple[Memory, ...]
  disk: Memory
  shards: int = 1  # So many such machines; the first of them leads.

  @property
  def memory_gib(self) -> int:
    """GiB of memory, rounded up; clouds have no less than one for a CPU."""
    return max(self.cpus, _gib(sum(each.nbytes for each in self.memory)))

  @property
  def disk_gib(self) -> int:
    """GiB of disk, rounded up."""
    return _gib(self.disk.nbytes)


def machine(
  n: float,
  f: float,
  b: float,
  ahead: int,
  learners: int,
  moments: int = 1,
  kept: int = KEPT,
  whole: float | None = None,
) -> SyncerMachine:
  """Returns the machine of a syncer, or of a shard that has `n` and `f`.

  The arguments are those of `of_syncer`.

  Args:
    kept: checkpoints that stay; one more is on the disk while it is written.
    whole: parameters of all shards, which the leader gathers at the end; None:
      there are no others.
  """
  state = (2 + moments) * F32_BYTES
  result = F32_BYTES * (whole or n)
  gathered = (Memory('the result, gathered', '4N of all', result),)
  return SyncerMachine(
    cpus=CPUS if learners < DECODES_LONGER else CPUS_OF_MANY,
    memory=(
      *of_syncer(n, f, b, ahead, learners, moments),
      *(gathered if whole else ()),
      Memory('Python, jax, text, connections', '', PROCESS_BYTES),
    ),
    disk=Memory(
      f'disk: {kept + 1} checkpoints, result, logs',
      f'{(kept + 1) * state}N + 4N + {in_bytes(FILES_BYTES)}',
      (kept + 1) * state * n + result + FILES_BYTES,
    ),
  )


def of_layout(config: RunConfig, layout: Layout) -> SyncerMachine:
  """Returns the machine of each process of a run's syncer."""
  shards, codec = config.syncer.shards, config.codec
  owners = shards_of(layout, shards)
  values = [
    [sum(x.size for x in owners.pieces(p, s)) for p in owners.of_shard(s)]
    for s in range(shards)
  ]
  n, f = max(map(sum, values)), max(map(max, values))
  whole = sum(layout.sizes)
  one = machine(
    n,
    f,
    max(map(codec.value_bytes, (codec.up, codec.down))),
    config.protocol.inflight_max,
    config.protocol.learners,
    moments_of(config.outer.optimizer),
    config.checkpoint.keep_latest,
    whole if shards > 1 else None,
  )
  one = dataclasses.replace(one, shards=shards)
  if not config.run.eval_every_rounds:
    return one
  # Beside the leader: Θ as it was read, and as the model has it.
  reader = Memory('the evaluator', '8N', 2 * F32_BYTES * whole + PROCESS_BYTES)
  return dataclasses.replace(
    one, cpus=one.cpus + EVALUATOR_CPUS, memory=(*one.memory, reader)
  )


def layout_of(config: RunConfig) -> Layout | None:
  """Returns that of a decoder; None: the size of the model is not known here.

  Raises:
    ValueError: the model can not be cut as configured.
  """
  sizes = sizes_of(config.model)
  if sizes is None:
    return None
  return make_layout(
    {path: TensorSpec(*each) for path, each in sizes.trained.items()},
    config.fragments.scheme,
    config.protocol.fragments,
    config.fragments.embedding,
  )


def of_config(config: RunConfig) -> SyncerMachine | None:
  """Returns the machine for a layout, None and errors as of `layout_of`."""
  layout = layout_of(config)
  return layout and of_layout(config, layout)


def machine_lines(machine: SyncerMachine) -> Iterator[str]:
  """Yields the machine as text of at most 80 columns."""
  whose = 'its machine'
  if machine.shards > 1:
    whose = f'each of its {machine.shards} machines'
  yield from lines((*machine.memory, machine.disk))
  yield (
    f'  {whose}: {machine.cpus} CPUs, {machine.memory_gib} GiB of memory, '
    f'{machine.disk_gib} GiB of disk'
  )


def _gib(nbytes: float) -> int:
  return math.ceil(nbytes / GIB)
