# SPDX-License-Identifier: Apache-2.0
"""How should the outer gradients of many learners be merged?

Four rules with 2 to 16 learners, which share the sequences of a step: the mean;
RDA for all but the embeddings; the same with the embeddings in a fragment of
their own; RDA for everything. The third is there because RDA of an embedding
needs it in one piece, which is a change by itself. The outer optimizer is the
same for all.

Look at: the loss against data-parallel by number of learners.
"""

from experiments import study

RULES = {
  'mean': ('mean', 'mean', 'split'),
  'RDA but for embeddings': ('rda', 'mean', 'split'),
  'RDA but for embeddings, these apart': ('rda', 'mean', 'own'),
  'RDA, embeddings apart': ('rda', 'rda', 'own'),
}


FIRST_SEED = study.FIRST_SEED
get_config = study.base('merging')


def sweep(add):
  variants, places = {}, {}
  for number in (2, 4, 8, 16):
    for rule, values in RULES.items():
      keys = ('merge.rule', 'merge.embedding', 'fragments.embedding')
      label = f'M = {number}, {rule}'
      variants[label] = study.learners(number) | dict(zip(keys, values))
      places[label] = ('learners M', rule, number)
  study.add_variants(add, variants, places)
