# SPDX-License-Identifier: Apache-2.0
"""How late may an update arrive, and how should a learner take it in?

τ inner steps may pass between the snapshot of a fragment and its update. The
progress made meanwhile is kept (carry), lost (overwrite), or kept in part
(mix). With τ = 0 all learners wait for the update; with a quorum of one as
well, the work of a learner that was not merged is lost.

Look at: the loss against data-parallel by τ and rule, and `delay_steps` in the
results, the steps that updates really took.

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
