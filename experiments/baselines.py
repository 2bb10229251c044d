# SPDX-License-Identifier: Apache-2.0
"""What does each way to train on several machines cost in loss and in time?

Decoupled DiLoCo beside synchronous and streaming DiLoCo, plain and elastic
data-parallel, at equal tokens, and one learner alone with a quarter of them;
then all but that one with deaths: each learner dies every 120 steps on average
and is away for 20, the same deaths for every system, and data-parallel stands
still for 2 steps whenever its group changes.

Command: python -m diloco.lab --config=experiments/baselines.py --sweep \
  --workdir=runs/baselines
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: baselines.py:quicktest, baselines.py:scale=150m; others in study.py.
"""

from experiments import recipe, study

DEATHS = {'lab.mtbf_steps': 120.0, 'lab.away_steps': 20.0}


def get_config(arg=None):
  return study.config_of('baselines', arg)


def systems():
  """Changes of a configuration such as the above, by the system's name."""
  parallel = recipe.DATA_PARALLEL
  everybody = {
    'protocol.quorum': 0,
    'protocol.grace_cap_steps': 0.0,
    'protocol.admission': 'fresh',
  }
  return {
    study.DATA_PARALLEL: parallel,
    'elastic data-parallel': parallel | {'lab.system': 'elastic'},
    'alone': parallel | {'lab.system': 'alone'},
    # All wait at every H steps for one exchange of the whole model, in f32.
    'synchronous': {
      **everybody,
      'protocol.fragments': 1,
      'protocol.overlap_steps': 0,
      'protocol.blend': 'overwrite',
      'codec.up': 'f32',
      'codec.down': 'f32',
    },
    # One fragment at a time, while training goes on; all learners, in int4.
    'streaming': everybody,
    study.BASE: {},
  }


def sweep(add):
  base = study.DATA_PARALLEL
  for name, changes in systems().items():
    add(name, changes, against=None if name == base else base)
  for name, changes in systems().items():
    if name != 'alone':
      add(f'{name}, deaths', changes | DEATHS, against=base)
