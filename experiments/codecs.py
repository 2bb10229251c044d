# SPDX-License-Identifier: Apache-2.0
"""How few bits per value can the exchange use without a higher loss?

One variant for each codec in both directions, two with int4 in one direction
and f32 in the other, and three without the syncer's error feedback.

Look at: the loss against data-parallel by codec.
"""

from experiments import study

get_config = study.base('codecs')


def sweep(add):
  def both(codec):
    return {'codec.up': codec, 'codec.down': codec}

  variants = {
    codec: both(codec) for codec in ('f32', 'bf16', 'int8', 'int2', 'int1')
  }
  variants |= {
    'int4 up': {'codec.down': 'f32'},
    'int4 down': {'codec.up': 'f32'},
  }
  variants['e3m0'] = both('experiments.e3m0:make')
  for codec in ('int4', 'int2', 'int1'):
    variants[f'{codec}, no error feedback'] = both(codec) | {
      'codec.error_feedback': False
    }
  study.add_variants(add, variants)
