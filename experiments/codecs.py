# SPDX-License-Identifier: Apache-2.0
"""How few bits per value can the exchange use without a higher loss?

One variant for each codec in both directions, two with int4 in one direction
and f32 in the other, some without the syncer's error feedback, some in which
learners, too, add what an offer lost by rounding to their next one, and int4 of
which offers are rounded at random.

Look at: the loss against data-parallel by codec.
"""

from experiments import study

E3M0 = 'experiments.four_bits:e3m0'
AT_RANDOM = 'experiments.four_bits:at_random'

FIRST_SEED = study.FIRST_SEED
get_config = study.base('codecs')


def sweep(add):
  def both(codec):
    return {'codec.up': codec, 'codec.down': codec}

  whole = {codec: both(codec) for codec in ('f32', 'bf16', 'int8')}
  few = {'e3m0': both(E3M0), 'int2': both('int2'), 'int1': both('int1')}
  variants = (
    whole
    | few
    | {'int4 up': {'codec.down': 'f32'}, 'int4 down': {'codec.up': 'f32'}}
    | {'int4, offers rounded at random': {'codec.up': AT_RANDOM}}
  )
  for codec, changes in {'int4': {}, **few}.items():
    variants[f'{codec}, no error feedback'] = changes | {
      'codec.error_feedback': False
    }
    variants[f'{codec}, feedback on both legs'] = changes | {
      'lab.up_feedback': True
    }
  study.add_variants(add, variants)
