# SPDX-License-Identifier: Apache-2.0
"""How near does Decoupled DiLoCo with int4 both ways come to data-parallel?

A byte-level decoder of 131 k parameters on the source of the standard library,
2,000 steps of 32 sequences of 64 bytes in all, by M = 2, 4 and 8 learners;
H = 24, P = 8, τ = 1, K = 1, grace window on, the library's defaults else.
Data-parallel has the same tokens, the same global batch, and a schedule and
rate of its own, the best of those tried. Losses are of the global model on
held-out text.

Command: python -m diloco.lab --config=experiments/recipe.py --sweep \\
  --workdir=runs/recipe
Hardware: 2 CPU cores, no accelerator. Wall time and result:
  experiments/README.md. How it was found: tried.py. A page of it:
  python -m diloco.report --workdir=runs/recipe
Variants: recipe.py:learners=2, recipe.py:steps=6000, recipe.py:quicktest,
  recipe.py:scale=150m (scales.py).
"""

from experiments import common, scales

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
  args = common.parse_arg(
    arg, quicktest=False, learners=4, steps=0, scale=scales.SMALL
  )
  config = common.base()
  config.name = 'recipe'
  config.protocol.update(
    learners=args.learners, overlap_steps=1, grace_cap_steps=1.0
  )
  scales.apply(config, args.scale)
  if args.scale == scales.SMALL:
    config.data.update(batch=SEQUENCES // args.learners, shards=args.learners)
  if args.steps:  # 0: as many as the scale has.
    config.protocol.total_steps = args.steps
    config.inner.warmup_steps = args.steps // 10
  return common.quicktest(config) if args.quicktest else config


def sweep(add):
  add(LABEL, DATA_PARALLEL)
  for number in LEARNERS:
    add(f'M = {number}', learners(number), against=LABEL, at=place(number))


def learners(number):
  """Changes: so many learners with the sequences of a step between them."""
  return {
    'protocol.learners': number,
    'data.batch': SEQUENCES // number,
    'data.shards': number,
  }


def place(number):
  """Returns the place of a variant in the chart of the recipe."""
  return 'learners M', 'H = 24', number
