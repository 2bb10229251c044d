# SPDX-License-Identifier: Apache-2.0
"""The machine of a syncer, or of each of its shards: CPUs, memory, disk.

`diloco.plan` prints it and launchers ask for it; importing this imports no jax.
"""

import dataclasses
import math
from collections.abc import Iterator

from diloco.config.run_config import RunConfig
from diloco.models.kinds import sizes_of
from diloco.numerics.codec import make_codec
from diloco.numerics.fragments import Layout, TensorSpec, make_layout
from diloco.numerics.optimizers import OUTER
from diloco.numerics.shard_assignment import shards_of
from diloco.sizing import host_memory
from diloco.sizing.host_memory import F32_BYTES, Memory, in_bytes

GIB = 1 << 30
# Python, jax, some hundred MB of text, two threads a learner.
PROCESS_BYTES = 4e9
# Logs, tapes, curves; the container's image, where it is the machine's disk.
FILES_BYTES = 30e9
KEPT = 2  # Checkpoints that stay, unless the configuration says otherwise.
# Side by side: what merges, what decodes, what connects, what saves. With ten
# learners, contributions are most of a round's work (`host_speeds.json`).
CPUS = 4
DECODES_LONGER = 10
CPUS_OF_MANY = 6
EVALUATOR_CPUS = 2


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

  The arguments are those of `host_memory.of_syncer`.

  Args:
    kept: checkpoints that stay; one more is on the disk while it is written.
    whole: parameters of all shards, which the lead gathers at the end; None:
      there are no others.
  """
  state = (2 + moments) * F32_BYTES
  result = F32_BYTES * (whole or n)
  gathered = (Memory('the result, gathered', '4N of all', result),)
  return SyncerMachine(
    cpus=CPUS if learners < DECODES_LONGER else CPUS_OF_MANY,
    memory=(
      *host_memory.of_syncer(n, f, b, ahead, learners, moments),
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
  shards = config.syncer.shards
  owners = shards_of(layout, shards)
  values = [
    [sum(x.size for x in owners.pieces(p, s)) for p in owners.of_shard(s)]
    for s in range(shards)
  ]
  n, f = max(map(sum, values)), max(map(max, values))
  whole = sum(layout.sizes)
  found = machine(
    n,
    f,
    max(_value_bytes(config, name, f) for name in ('up', 'down')),
    config.protocol.inflight_max,
    config.protocol.learners,
    OUTER[config.outer.optimizer].moments,
    config.checkpoint.keep_latest + config.checkpoint.keep_best,
    whole if shards > 1 else None,
  )
  found = dataclasses.replace(found, shards=shards)
  if not config.run.eval_every_rounds:
    return found
  # Beside the lead: Θ as it was read, and as the model has it.
  reader = Memory('the evaluator', '8N', 2 * F32_BYTES * whole + PROCESS_BYTES)
  return dataclasses.replace(
    found, cpus=found.cpus + EVALUATOR_CPUS, memory=(*found.memory, reader)
  )


def of_config(config: RunConfig) -> SyncerMachine | None:
  """Returns that of a decoder; None: the size of the model is not known here.

  Raises:
    ValueError: the model can not be cut as configured.
  """
  sizes = sizes_of(config.model)
  if sizes is None:
    return None
  layout = make_layout(
    {path: TensorSpec(*each) for path, each in sizes.arrays.items()},
    config.fragments.scheme,
    config.protocol.fragments,
    config.fragments.embedding,
  )
  return of_layout(config, layout)


def lines(found: SyncerMachine) -> Iterator[str]:
  """Yields the machine as text of at most 80 columns."""
  whose = 'its machine'
  if found.shards > 1:
    whose = f'each of its {found.shards} machines'
  yield from host_memory.lines((*found.memory, found.disk))
  yield (
    f'  {whose}: {found.cpus} CPUs, {found.memory_gib} GiB of memory, '
    f'{found.disk_gib} GiB of disk'
  )


def _value_bytes(config: RunConfig, direction: str, values: int) -> float:
  codec = config.codec
  made = make_codec(getattr(codec, direction), codec.block_size, codec.scale)
  return made.nbytes(values) / values


def _gib(nbytes: float) -> int:
  return math.ceil(nbytes / GIB)
