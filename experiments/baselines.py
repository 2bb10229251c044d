# SPDX-License-Identifier: Apache-2.0
"""How good is each way to train on several machines, in loss and goodput?

Decoupled DiLoCo beside synchronous DiLoCo, streaming DiLoCo, plain and elastic
data-parallel, all with the same number of tokens, and one learner alone with a
quarter of them. All but the last are run again with deaths: each learner dies
every 120 steps on average and is away for 20 steps, at the same times in every
system; data-parallel stands still for 2 steps whenever its group changes.

Look at: loss against data-parallel, and goodput without and with deaths.
"""

from experiments import recipe, study

DEATHS = {'lab.mtbf_steps': 120.0, 'lab.away_steps': 20.0}


FIRST_SEED = study.FIRST_SEED
get_config = study.base('baselines')


def systems():
  """Changes of a configuration such as the above, by the system's name."""
  parallel = study.PARALLEL
  all_learners = {
    'protocol.quorum': 0,
    'protocol.grace_cap_steps': 0.0,
    'protocol.admission': 'fresh',
  }
  return {
    study.DATA_PARALLEL: parallel,
    'elastic data-parallel': parallel | {'lab.system': 'elastic'},
    'alone': parallel | {'lab.system': 'alone'},
    'synchronous': recipe.LOCK_STEP,
    # One fragment at a time, while training goes on; all learners, in int4.
    'streaming': all_learners,
    study.BASE: {},
  }


def sweep(add):
  base = study.DATA_PARALLEL
  for name, changes in systems().items():
    add(name, changes, against=None if name == base else base)
  for name, changes in systems().items():
    if name != 'alone':
      add(f'{name}, deaths', changes | DEATHS, against=base)
