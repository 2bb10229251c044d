# SPDX-License-Identifier: Apache-2.0
"""The run that the studies of quality vary, and what they are compared with.

A byte-level decoder of 131 k parameters, 600 steps of 16 sequences of 64 bytes
in all, learners in step; all settings that a study does not name are the
library's defaults. Short on purpose: many variants, each over several seeds,
in minutes. What is right at another horizon, `recipe.py` asks.

Arguments of every study: quicktest, learners=4, steps=600, scale=small; the
other scales stand in `scales.py`, their steps are their token budget's.
"""

import ml_collections

from experiments import common, recipe, scales

SEQUENCES = 16  # In one step of all learners together, whatever their number.
STEPS = 600
BASE = 'decoupled'  # The variant with nothing changed.
DATA_PARALLEL = 'data-parallel'


def config_of(name: str, arg: str | None) -> ml_collections.ConfigDict:
  """The unchanged variant of the study of that name."""
  args = common.parse_arg(
    arg, quicktest=False, learners=4, steps=0, scale=scales.SMALL
  )
  config = common.base()
  config.name = name
  config.protocol.update(
    learners=args.learners, overlap_steps=1, grace_cap_steps=1.0
  )
  scales.apply(config, args.scale)
  if args.scale == scales.SMALL:
    config.data.update(batch=SEQUENCES // args.learners, shards=args.learners)
  steps = args.steps or (STEPS if args.scale == scales.SMALL else 0)
  if steps:  # Else as many as the scale has.
    config.protocol.total_steps = steps
    config.inner.warmup_steps = steps // 10
  return common.quicktest(config) if args.quicktest else config


def add_references(add, at=()):
  """Data-parallel; against it the unchanged variant, `at` these places."""
  add(DATA_PARALLEL, recipe.DATA_PARALLEL)
  add(BASE, {}, against=DATA_PARALLEL, at=at)


def steps_of(number: int) -> dict[str, object]:
  """Changes: so many inner steps, a tenth of them to warm up."""
  return {
    'protocol.total_steps': number,
    'inner.warmup_steps': number // 10,
  }


def learners(number: int) -> dict[str, object]:
  """Changes: so many learners with the sequences of a step between them."""
  return {
    'protocol.learners': number,
    'data.batch': SEQUENCES // number,
    'data.shards': number,
  }
