# SPDX-License-Identifier: Apache-2.0
"""The flags by which a plan and a dry run name a slice; without jax."""

from absl import flags

TOPOLOGY = 'topology'
COMPILER = 'compiler'
NAMES = (TOPOLOGY, COMPILER)


def define() -> None:
  """Defines --topology and --compiler."""
  flags.DEFINE_string(
    TOPOLOGY, None, 'A slice to compile for, such as v5p-256.'
  )
  flags.DEFINE_enum(
    COMPILER, '', ['', 'tpu', 'cpu'], 'For a slice; default: what is here.'
  )
