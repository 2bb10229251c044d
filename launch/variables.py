# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a run's processes, by role, and flags of XLA.

  --env=NAME=VALUE           for every process
  --env=learner:NAME=VALUE   for those of one kind of role

Learners on accelerators get the flags of `OVERLAP`, so that they compute while
parameters are gathered and gradients scattered. Of equal flags the last one
counts: what a user asks for stands behind what is the default.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

XLA_FLAGS = 'XLA_FLAGS'
LIBTPU = 'LIBTPU_INIT_ARGS'
FLAGS = (XLA_FLAGS, LIBTPU)  # Variables whose values are flags.
TPU, GPU = 'tpu', 'gpu'
# Gathers become starts and ends, with products between them; several in a row
# are one. libtpu 0.0.42 does so for a v5e by itself: its program of a step of
# `scale=1b` is the same without them.
OVERLAP = {
  TPU: (
    LIBTPU,
    (
      '--xla_tpu_enable_async_collective_fusion=true',
      '--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true',
      '--xla_tpu_enable_async_collective_fusion_multiple_steps=true',
      '--xla_tpu_overlap_compute_collective_tc=true',
      '--xla_enable_async_all_gather=true',
    ),
  ),
  GPU: (
    XLA_FLAGS,
    (
      '--xla_gpu_enable_latency_hiding_scheduler=true',
      '--xla_gpu_enable_pipelined_all_gather=true',
      '--xla_gpu_enable_pipelined_reduce_scatter=true',
    ),
  ),
}
Variables = tuple[tuple[str, str], ...]


def of_kind(asked: Sequence[str], kind: str) -> Variables:
  """Returns what is added to the environment of the processes of a role.

  Args:
    asked: the values of --env.
    kind: a key of `program.KINDS`.
  """
  return joined(
    (name, value)
    for role, name, value in map(_split, asked)
    if role in ('', kind)
  )


def on(
  platform: str, own: Variables, launcher: Mapping[str, str] | None = None
) -> Variables:
  """Returns a learner's variables with the flags of its accelerators.

  Args:
    platform: `TPU` or `GPU`.
    own: what has been asked for.
    launcher: the environment of the launcher, if the learner inherits it.
  """
  name, flags = OVERLAP[platform]
  known = [(name, launcher[name])] if name in (launcher or {}) else []
  return joined([(name, ' '.join(flags)), *known, *own])


def joined(pairs: Iterable[tuple[str, str]]) -> Variables:
  """Returns each variable once: the last, or flags one after the other."""
  result: dict[str, str] = {}
  for name, value in pairs:
    before = result.get(name, '') if name in FLAGS else ''
    result[name] = f'{before} {value}'.strip()
  return tuple(result.items())


def problems(asked: Sequence[str], kinds: Iterable[str]) -> Iterator[str]:
  """Yields which values of --env are no variable, or for no role."""
  for text in asked:
    role, name, _ = _split(text)
    if not (name.isidentifier() and '=' in text):
      yield f'--env={text}: must be NAME=VALUE, or ROLE:NAME=VALUE'
    elif role and role not in kinds:
      yield f'--env={text}: {role!r} must be one of {", ".join(kinds)}'


def _split(text: str) -> tuple[str, str, str]:
  """Returns role, name and value; the role is '' if it is for all."""
  name, _, value = text.partition('=')
  role, colon, rest = name.partition(':')
  return (role, rest, value) if colon else ('', name, value)
