# SPDX-License-Identifier: Apache-2.0
"""Does the loss depend on how the model is cut into fragments?

Three ways of cutting: balanced bins of whole tensors, single tensors in turn,
whole layers. The embedding is cut by rows over all fragments, or is a fragment
of its own.

Look at: the loss against data-parallel by way of cutting.

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
