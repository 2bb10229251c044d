# SPDX-License-Identifier: Apache-2.0
"""Does it matter how the model is cut into fragments?

Balanced bins of whole tensors and rows of the embedding, single tensors in
turn, or whole layers; the embedding split over all fragments or on its own.

Command: python -m diloco.lab --config=experiments/fragmentation.py --sweep \\
  --workdir=runs/fragmentation
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: fragmentation.py:quicktest; others in study.py.
"""

from experiments import study


def get_config(arg=None):
  return study.config_of('fragmentation', arg)


def sweep(add):
  study.add_references(add)
  for scheme in ('tensor', 'layer'):
    add(scheme, {'fragments.scheme': scheme}, against=study.DATA_PARALLEL)
  add(
    'own embedding',
    {'fragments.embedding': 'own'},
    against=study.DATA_PARALLEL,
  )
