# SPDX-License-Identifier: Apache-2.0
"""How close does Decoupled DiLoCo, with int4 both ways, come to data-parallel?

A byte-level decoder of 131 k parameters on the source of the standard library:
2,000 steps of 32 sequences of 64 bytes, shared by M = 2, 4 or 8 learners. Each
fragment is synchronised every H = 24 steps, in P = 8 fragments, with one step
of overlap (τ = 1), a quorum of one (K = 1) and the grace window; all else is
the default. Data-parallel has the same tokens, the same global batch, and the
best schedule and learning rate of those tried for it.

Look at: the loss of the global model on held-out text against data-parallel.
Arguments: learners=2, steps=6000, scale=150m (`scales.py`), quicktest.
"""

from experiments import scales

SEQUENCES = 32  # In one step of all learners together.
# Data-parallel is best with a higher rate than a learner, and falls to 0.
DATA_PARALLEL = {
  'lab.system': 'data_parallel',
  'inner.lr': 16e-3,
  'inner.final_fraction': 0.0,
}
LABEL = 'data-parallel'
STEPS = scales.SMALL_STEPS
LEARNERS = (2, 4, 8)


def get_config(arg=None):
  return scales.scaled('recipe', arg, SEQUENCES)


def sweep(add):
  add(LABEL, DATA_PARALLEL)
  for number in LEARNERS:
    add(f'M = {number}', learners(number), against=LABEL, at=place(number))


def learners(number):
  return scales.learners(number, SEQUENCES)


def place(number):
  """Returns the place of a variant in the chart of the recipe."""
  return 'learners M', 'H = 24', number
