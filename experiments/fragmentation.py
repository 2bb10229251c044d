# SPDX-License-Identifier: Apache-2.0
"""Does the loss depend on how the model is cut into fragments?

Three ways of cutting: balanced bins of whole tensors, single tensors in turn,
whole layers. The embedding is cut by rows over all fragments, or is a fragment
of its own. A link must carry the largest fragment in the time of one:

  python -m diloco.lab --config=experiments/fragmentation.py --sweep
  python -m experiments.fragmentation [5b]

The second command prints by how much the largest is above the mean, here or at
one of the sizes of `scales.py`.

Look at: the loss against data-parallel by way of cutting, and that factor,
which is the peak bandwidth for the mean one (the paper's Table 7).
"""

import sys

from diloco.sizing import memory
from diloco.sweeps import making
from diloco.sweeps import sweep as sweeps
from experiments import scales, study

FIRST_SEED = study.FIRST_SEED
get_config = study.base('fragmentation')


def sweep(add):
  variants = {
    'tensor': {'fragments.scheme': 'tensor'},
    'layer': {'fragments.scheme': 'layer'},
    'own embedding': {'fragments.embedding': 'own'},
  }
  study.add_variants(add, variants)


def main(scale: str = scales.SMALL) -> None:
  base = get_config()
  base.model.update(scales.SCALES[scale]['model'])
  rows = sweeps.variants(sweep)[1:]  # Data-parallel has no fragments.
  for label, config in making.make_configs(base.to_dict(), rows).items():
    sizes = memory.layout_of(config).sizes
    factor = max(sizes) * len(sizes) / sum(sizes)
    print(f'{label}: the largest of {len(sizes)} is {factor:.2f} of the mean')


if __name__ == '__main__':
  main(*sys.argv[1:])
