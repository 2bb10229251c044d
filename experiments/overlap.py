# SPDX-License-Identifier: Apache-2.0
"""How late may an update arrive, and how should a learner take it in?

τ inner steps may pass between the snapshot of a fragment and its update. The
progress made meanwhile is kept (rebase), lost (replace), or kept in part
(interpolate). An update is taken in when it is there, so the link is as slow as
τ allows. With τ = 0 all learners wait for the update; with a quorum of one as
well, the work of a learner that was not merged is lost.

Look at: the loss against data-parallel by τ and rule, and the delay, the steps
that updates really took.
"""

from experiments import study

AXIS = 'τ, inner steps'
FAST_S = 0.01  # Latency of the lab's link, one way, and a fragment's transfer,
FAST_STEPS = 2.2  # over which an update takes so many steps.
LATENCIES = 3  # From a copy to its update: offer, notice, and the pull's begin.


FIRST_SEED = study.FIRST_SEED
get_config = study.base('overlap')


def sweep(add):
  variants, places = {}, {}
  for steps in (2, 6, 12):
    for blend in ('rebase', 'replace'):
      label = f'τ = {steps}, {blend}'
      variants[label] = _taken_in(steps, blend)
      places[label] = (AXIS, blend, steps)
  interpolated = _taken_in(6, 'interpolate') | {'protocol.blend_alpha': 0.5}
  waiting = _taken_in(0, 'replace')
  variants |= {
    'τ = 6, interpolate': interpolated,
    'τ = 0, replace': waiting,
    'τ = 0, replace, K = 4': waiting | {'protocol.quorum': 0},
  }
  places['τ = 0, replace, K = 4'] = (AXIS, 'replace', 0)
  study.add_variants(add, variants, places)


def _taken_in(steps, blend):
  latency_s = max(FAST_S, (steps - FAST_STEPS) / LATENCIES)  # A step is 1 s.
  return {
    'protocol.overlap_steps': steps,
    'protocol.blend': blend,
    'lab.latency_s': latency_s,
    'lab.transfer_s': FAST_S,
  }
