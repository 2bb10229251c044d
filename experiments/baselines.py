# SPDX-License-Identifier: Apache-2.0
"""What does each way to train on several machines cost in loss and in time?

The model and the data of `recipe.py`, M = 4, at equal tokens: Decoupled DiLoCo
beside synchronous and streaming DiLoCo, plain and elastic data-parallel, and
one learner alone with a quarter of the tokens. `baselines.py:deaths` kills
learners: each dies every 400 steps on average and is away for 40, the same
deaths for every system; data-parallel stands still for 2 steps whenever its
group changes.

Command: python -m diloco.lab --config=experiments/baselines.py --sweep \\
  --workdir=runs/baselines
Hardware: 2 CPU cores, no accelerator. Wall time and result: TBD, filled in
  from a run; a run takes about 3 minutes, two side by side.
Variants: baselines.py:deaths, baselines.py:learners=2, baselines.py:steps=6000,
  baselines.py:quicktest.
"""

from experiments import common


def get_config(arg=None):
  args = common.parse_arg(
    arg, quicktest=False, deaths=False, learners=4, steps=2000
  )
  config = common.base()
  config.name = 'baselines'
  config.model.update(
    layers=2, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=192
  )
  config.data.update(seq_len=64, batch=8)
  config.inner.update(lr=8e-3, warmup_steps=50)
  config.outer.update(lr=0.6, momentum=0.7)
  config.protocol.update(
    learners=args.learners,
    overlap_steps=1,
    total_steps=args.steps,
    grace_cap_steps=1.0,
    blend='carry',
  )
  if args.deaths:
    config.lab.update(mtbf_steps=400.0, away_steps=40.0)
  return common.quicktest(config) if args.quicktest else config


def systems():
  """Changes of a configuration such as the above, by the system's name."""
  everybody = {
    'protocol.quorum': 0,
    'protocol.grace_cap_steps': 0.0,
    'protocol.admission': 'fresh',
  }
  return {
    'data_parallel': {'lab.system': 'data_parallel', 'inner.lr': 16e-3},
    'elastic': {'lab.system': 'elastic', 'inner.lr': 16e-3},
    'alone': {'lab.system': 'alone', 'inner.lr': 16e-3},
    # All wait at every H steps for one exchange of the whole model, in f32.
    'synchronous': {
      **everybody,
      'protocol.fragments': 1,
      'protocol.overlap_steps': 0,
      'protocol.blend': 'overwrite',
      'codec.up': 'f32',
      'codec.down': 'f32',
    },
    # A fragment at a time, while training goes on; everybody's, in int4.
    'streaming': everybody,
    'decoupled': {},
  }


def sweep(add):
  """Each against data-parallel."""
  base = 'data_parallel'
  for name, changes in systems().items():
    add(name, changes, against=None if name == base else base)
