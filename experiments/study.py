# SPDX-License-Identifier: Apache-2.0
"""The run that the studies of quality vary, and what they are compared with.

A byte-level decoder of 131 k parameters, 600 steps of 16 sequences of 64 bytes
in all, learners in step; all settings that a study does not name are the
library's defaults. Short on purpose: many variants, each over several seeds,
in minutes. What is right at another horizon, `recipe.py` asks.

  python -m diloco.lab --config=experiments/cadence.py --sweep \\
    --workdir=runs/cadence

Arguments of every study: quicktest, learners=4, steps=600, scale=small; the
other scales stand in `scales.py`, their steps are their token budget's.
"""

import types
from collections.abc import Callable, Mapping

import ml_collections

from experiments import recipe, scales

SEQUENCES = 16  # In one step of all learners together, whatever their number.
STEPS = 600
FIRST_SEED = recipe.FIRST_SEED  # Rates were chosen on others.
BASE = 'decoupled'  # The variant with nothing changed.
DATA_PARALLEL = 'data-parallel'
# Its rate falls to 0, which is best where no average is taken at the end.
PARALLEL = recipe.DATA_PARALLEL | {
  'inner.lr': scales.rate_of(SEQUENCES),
  'inner.final_fraction': 0.0,
}


def base(name: str) -> Callable[..., ml_collections.ConfigDict]:
  """Returns `get_config(arg)` of the study of that name, nothing changed."""
  return lambda arg=None: scales.scaled(name, arg, SEQUENCES, STEPS)


def add_variants(
  add,
  variants: Mapping[str, Mapping],
  places: Mapping = types.MappingProxyType({}),
  at=(),
) -> None:
  """Adds data-parallel, and against it the unchanged variant and the others.

  Args:
    variants: changes by label.
    places: of variants in charts, by label.
    at: places of the unchanged variant.
  """
  add(DATA_PARALLEL, PARALLEL)
  add(BASE, {}, against=DATA_PARALLEL, at=at)
  for label, changes in variants.items():
    add(label, changes, against=DATA_PARALLEL, at=places.get(label, ()))


def learners(number: int) -> dict[str, object]:
  return scales.learners(number, SEQUENCES)
