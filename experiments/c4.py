# SPDX-License-Identifier: Apache-2.0
"""How is a run set up that trains on C4, in word pieces read from files?

The recipe at a scale of `scales.py` on TFDS's c4/en in ArrayRecord, with its
own validation split held out. Documents are read by number and tokenised as
they are needed. This takes an index, which is built once (`diloco.index_data`,
on as many machines as share `data.index_path`). Tokens written by
`diloco.write_records` need neither the index nor a tokenizer in the step.

Command: python -m launch.local --config=experiments/c4.py --workdir=DIR \\
  --config.data.path='gs://BUCKET/c4/en/3.0.1/c4-train*' \\
  --config.data.heldout_path='gs://BUCKET/c4/en/3.0.1/c4-validation*' \\
  --config.data.tokenizer=sentencepiece:FILE
Hardware: devices as the scale's mesh says, per learner. Wall time and result:
  TBD, filled in from the first run.
Variants: c4.py:scale=1b, c4.py:learners=8, c4.py:quicktest.
"""

from experiments import common, scales

VOCAB = 32_128  # Of T5's tokenizer, padded: it divides by all meshes here.
PATH = '/data/c4/en/3.0.1'


@common.experiment('c4', learners=4, scale='150m')
def get_config(config, args):
  config.protocol.update(
    learners=args.learners, overlap_steps=1, grace_cap_steps=1.0
  )
  scales.apply(config, args.scale)
  config.model.vocab = VOCAB
  config.data.update(
    source='array_record',
    path=f'{PATH}/c4-train.array_record*',
    heldout_path=f'{PATH}/c4-validation.array_record*',
    tokenizer='sentencepiece:/data/spiece.model',
    threads=4,
  )
