# SPDX-License-Identifier: Apache-2.0
"""How old are merged contributions in training, and from how many learners?

Of runs that train, with the lab's delays: 0.01 step for a message, 0.1 for a
fragment. Learners have the same speed, and their steps vary by 5 %; H = 24.
The model is a small quadratic: times are simulated, so that the computation
has no influence on ages. The end of each run is included, where every learner
offers each fragment once more.

Look at: mean age, share of contributions older than 1.5 steps, participation.

Command: python -m diloco.lab --config=experiments/lab_age.py --sweep \\
  --seeds=1 --workdir=runs/lab_age
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: lab_age.py:quicktest, lab_age.py:learners=4, lab_age.py:steps=960.
"""

from experiments import common

LEARNERS = (2, 4, 8, 16)
FRAGMENTS = (1, 2, 4, 8, 24)
OVERLAPS = (1, 6)


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False, learners=4, steps=240)
  config = common.base()
  config.name = 'lab_age'
  config.model.update(kind='bowl', layers=max(FRAGMENTS), d_model=8, d_ff=8)
  config.data.update(
    source='grammar', seq_len=8, batch=1, grammar_bytes=1 << 16
  )
  config.data.shards = max(*LEARNERS, args.learners)
  config.inner.warmup_steps = 4
  config.protocol.update(
    learners=args.learners,
    fragments=1,
    overlap_steps=1,
    total_steps=args.steps,
  )
  config.run.update(eval_batches=2, eval_batch=4)
  config.lab.update(final_eval_batches=2, checkpoint_steps=0)
  return common.quicktest(config) if args.quicktest else config


def sweep(add):
  for overlap in OVERLAPS:
    for learners in LEARNERS:
      for quorum in sorted({1, learners // 2}):
        for fragments in FRAGMENTS:
          add(
            f'τ={overlap} M={learners} K={quorum} P={fragments}',
            {
              'protocol.overlap_steps': overlap,
              'protocol.learners': learners,
              'protocol.quorum': quorum,
              'protocol.fragments': fragments,
            },
          )
