# SPDX-License-Identifier: Apache-2.0
"""How late may an update come, and how is it taken in?

τ inner steps pass between the snapshot of a fragment and its update; these are
kept (carry), lost (overwrite), or partly kept (mix). With τ = 0 all learners
wait for the update; with K = 1 too, a learner that is not included has worked
in vain.

Command: python -m diloco.lab --config=experiments/overlap.py --sweep \\
  --workdir=runs/overlap
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: overlap.py:quicktest, overlap.py:scale=150m; others in study.py.
"""

from experiments import study


def get_config(arg=None):
  return study.config_of('overlap', arg)


def sweep(add):
  axis = 'τ, inner steps'
  study.add_references(add, at=(axis, 'carry', 1))
  for steps in (2, 6, 12):
    for blend in ('carry', 'overwrite'):
      add(
        f'τ = {steps}, {blend}',
        {'protocol.overlap_steps': steps, 'protocol.blend': blend},
        against=study.DATA_PARALLEL,
        at=(axis, blend, steps),
      )
  mix = {'protocol.blend': 'mix', 'protocol.blend_alpha': 0.5}
  add(
    'τ = 6, mix',
    {'protocol.overlap_steps': 6} | mix,
    against=study.DATA_PARALLEL,
  )
  waiting = {'protocol.overlap_steps': 0, 'protocol.blend': 'overwrite'}
  add('τ = 0, overwrite', waiting, against=study.DATA_PARALLEL)
  add(
    'τ = 0, overwrite, K = 4',
    waiting | {'protocol.quorum': 0},
    against=study.DATA_PARALLEL,
    at=(axis, 'overwrite', 0),
  )
