# SPDX-License-Identifier: Apache-2.0
"""A host of a learner with slices that notes each boundary in `$NOTED`: step,
rows, and the CRCs of all boxes of θ and the inner state.

It notes before the next step is dispatched, and waits for the devices. With
`$PLANTED` the moments are lost where a boundary comes out of memory.
"""

import json
import os
import pathlib
import runpy

import jax

from diloco.checkpoint.arrays import crcs_of, named
from diloco.learner.exchange_programs import ExchangePrograms
from diloco.learner.train_state import SteppingState
from diloco.protocol import host_messages

FOLDER = pathlib.Path(os.environ['NOTED'])


def main():
  perform, restored = SteppingState.perform, ExchangePrograms.restored

  def noting_perform(self, order, argument=None):
    if isinstance(order, host_messages.MakeStep):
      tree = {'params': self.params, 'optimizer': self.inner_state}
      boxes = {
        f'{name} {shard.index}': int(crc)
        for name, leaf in named(tree).items()
        for shard in leaf.addressable_shards
        for crc in crcs_of({name: shard.data})[name].values()
      }
      noted = {
        'process': os.getpid(),
        'step': json.loads(order.progress)['step'],
        'rows': order.rows,
        'batch': self._batch,
        'crcs': boxes,
      }
      path = FOLDER / f'{pathlib.Path(self._memory.path).name}.jsonl'
      with path.open('a') as file:
        file.write(json.dumps(noted) + '\n')
    return perform(self, order, argument)

  def without_moments(self, *arguments):
    params, state, bases = restored(self, *arguments)
    return params, jax.tree.map(lambda x: 0 * x, state), bases

  SteppingState.perform = noting_perform
  if os.environ.get('PLANTED'):
    ExchangePrograms.restored = without_moments
  runpy.run_module('diloco.learner', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
  main()
