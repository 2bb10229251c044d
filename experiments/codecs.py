# SPDX-License-Identifier: Apache-2.0
"""How few bits per value can the exchange use without a higher loss?

One variant for each codec in both directions, two with int4 in one direction
and f32 in the other, and three without the syncer's error feedback.

Look at: the loss against data-parallel by codec.

Command: python -m diloco.lab --config=experiments/codecs.py --sweep \\
  --workdir=runs/codecs
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: codecs.py:quicktest, codecs.py:scale=150m; others in study.py.
"""

from experiments import study


def get_config(arg=None):
  return study.config_of('codecs', arg)


def sweep(add):
  study.add_references(add)
  for codec in ('f32', 'bf16', 'int8', 'int2', 'int1'):
    both = {'codec.up': codec, 'codec.down': codec}
    add(codec, both, against=study.DATA_PARALLEL)
  add('int4 up', {'codec.down': 'f32'}, against=study.DATA_PARALLEL)
  add('int4 down', {'codec.up': 'f32'}, against=study.DATA_PARALLEL)
  for codec in ('int4', 'int2', 'int1'):
    both = {'codec.up': codec, 'codec.down': codec}
    add(
      f'{codec}, no error feedback',
      both | {'codec.error_feedback': False},
      against=study.DATA_PARALLEL,
    )
