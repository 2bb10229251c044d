# SPDX-License-Identifier: Apache-2.0
"""How close does Decoupled DiLoCo, with int4 both ways, come to data-parallel?

A byte-level decoder of 131 k parameters on the source of the standard library:
2,000 steps of 32 sequences of 64 bytes, shared by M = 1, 2, 4 or 8 learners.
Each fragment is synchronised every H = 24 steps, in P = 8 fragments, with one
step of overlap (τ = 1), a quorum of one (K = 1) and the grace window; all else
is the default. Data-parallel has the same windows of text in the same order,
and the best of the rates tried for it; half, one and a half and twice the
tokens say what a difference of loss is worth. Lock-step DiLoCo exchanges f32,
all at once, and waits for all; the controls take one thing away at a time.

  python -m diloco.lab --config=experiments/recipe.py --sweep \\
    --until_width=0.003

Seeds from 10 on, and the half of the held-out text that no choice has seen:
`tuning.py` chooses on the others.

Look at: the loss against data-parallel, and that of lock-step DiLoCo against
ours.
Arguments: learners=2, steps=6000, scale=150m (`scales.py`), paper (its M = 8,
P = H = 24, τ = 2), quicktest.
"""

from experiments import scales

SEQUENCES = 32  # In one step of all learners together.
DATA_PARALLEL = {
  'lab.system': 'data_parallel',
  'inner.lr': scales.rate_of(SEQUENCES),
}
LABEL = 'data-parallel'
STEPS = scales.SMALL_STEPS
LEARNERS = (1, 2, 4, 8)
BUDGETS = (0.5, 1.5, 2.0)  # Tokens of further data-parallel runs, in its own.
FIRST_SEED, HALF = 10, 'second'  # No choice was made on these.
# All wait at every H steps for one exchange of the whole model, in f32.
LOCK_STEP = {
  'protocol.quorum': 0,
  'protocol.grace_cap_steps': 0.0,
  'protocol.admission': 'fresh',
  'protocol.fragments': 1,
  'protocol.overlap_steps': 0,
  'protocol.blend': 'replace',
  'codec.up': 'f32',
  'codec.down': 'f32',
}
EVERY_STEP = LOCK_STEP | {
  'protocol.sync_every_steps': 1,
  'merge.rule': 'mean',
  'outer.lr': 1.0,
  'outer.momentum': 0.0,
  'outer.anneal_fraction': 0.0,
}
# What is left of the gap without one of its causes, M = 4. At the rate of four
# learners their mean lacks the gain of the outer step.
CONTROLS = {
  'f32': {'codec.up': 'f32', 'codec.down': 'f32'},
  'H = 1, plain means in f32': EVERY_STEP,
  "H = 1, plain means in f32, data-parallel's rate": EVERY_STEP
  | {'inner.lr': DATA_PARALLEL['inner.lr']},
}


def get_config(arg=None):
  config = scales.scaled('recipe', arg, SEQUENCES)
  config.lab.average_fraction = 0.03
  return config


def sweep(add):
  add(LABEL, DATA_PARALLEL)
  for number in LEARNERS:
    add(f'M = {number}', learners(number), against=LABEL, at=place(number))
  paper = {f'protocol.{key}': value for key, value in scales.PAPER.items()}
  changes = learners(scales.PAPER['learners']) | paper
  add("the paper's P, H and τ, M = 8", changes, against=LABEL)
  for number in (4, 8):
    changes = learners(number) | LOCK_STEP
    add(f'lock-step, M = {number}', changes, against=f'M = {number}')
  for name, changes in CONTROLS.items():
    add(f'M = 4, {name}', learners(4) | changes, against=LABEL)
  for tokens in BUDGETS:
    length = scales.steps_of(round(tokens * STEPS))
    add(budget(tokens), length | DATA_PARALLEL, against=LABEL)


def learners(number):
  return scales.learners(number, SEQUENCES)


def budget(tokens):
  """Returns the label of data-parallel with so many times the tokens."""
  return f'{LABEL}, tokens x {tokens:g}'


def place(number):
  """Returns the place of a variant in the chart of the recipe."""
  return 'learners M', 'H = 24', number
