# SPDX-License-Identifier: Apache-2.0
"""Does the loss depend on how the model is cut into fragments?

Three ways of cutting: balanced bins of whole tensors, single tensors in turn,
whole layers. The embedding is cut by rows over all fragments, or is a fragment
of its own.

Look at: the loss against data-parallel by way of cutting.
"""

from experiments import study

get_config = study.base('fragmentation')


def sweep(add):
  variants = {
    'tensor': {'fragments.scheme': 'tensor'},
    'layer': {'fragments.scheme': 'layer'},
    'own embedding': {'fragments.embedding': 'own'},
  }
  study.add_variants(add, variants)
