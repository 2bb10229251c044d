# SPDX-License-Identifier: Apache-2.0
"""How should the outer gradients of many learners be merged?

Four rules with 2 to 16 learners, which share the sequences of a step: the mean;
RDA for all but the embeddings; the same with the embeddings in a fragment of
their own; RDA for everything. The third is there because RDA of an embedding
needs it in one piece, which is a change by itself. The outer optimizer is the
same for all.

Look at: the loss against data-parallel by number of learners.

Command: python -m diloco.lab --config=experiments/merging.py --sweep \\
  --workdir=runs/merging
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: merging.py:quicktest, merging.py:scale=150m; others in study.py.
"""

from experiments import study


def get_config(arg=None):
  return study.config_of('merging', arg)


def sweep(add):
  study.add_references(add)
  rules = {
    'mean': ('mean', 'mean', 'split'),
    'RDA but for embeddings': ('rda', 'mean', 'split'),
    'RDA but for embeddings, these apart': ('rda', 'mean', 'own'),
    'RDA, embeddings apart': ('rda', 'rda', 'own'),
  }
  for number in (2, 4, 8, 16):
    for label, (rule, embedding, fragment) in rules.items():
      changes = {
        'merge.rule': rule,
        'merge.embedding': embedding,
        'fragments.embedding': fragment,
      }
      add(
        f'M = {number}, {label}',
        study.learners(number) | changes,
        against=study.DATA_PARALLEL,
        at=('learners M', label, number),
      )
