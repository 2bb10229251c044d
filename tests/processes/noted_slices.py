# SPDX-License-Identifier: Apache-2.0
"""A host of a learner with slices that notes each boundary in `$NOTED`: step,
rows, and the CRCs of all boxes of θ and the inner state.

It notes what came out of memory, before anything is done with it, and each
boundary as its next step is dispatched. With `$PLANTED` the moments are lost
where a boundary comes out of memory.
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


def note(state: SteppingState, step: int, rows: int):
  tree = {'params': state.params, 'optimizer': state.inner_state}
  boxes = {
    f'{name} {shard.index}': int(crc)
    for name, leaf in named(tree).items()
    for shard in leaf.addressable_shards
    for crc in crcs_of({name: shard.data})[name].values()
  }
  noted = {
    'process': os.getpid(),
    'step': step,
    'rows': rows,
    'batch': state._batch,
    'crcs': boxes,
  }
  with (FOLDER / f'{state._memory.path.name}.jsonl').open('a') as file:
    file.write(json.dumps(noted) + '\n')


def main():
  perform, restored = SteppingState.perform, ExchangePrograms.restored
  init = SteppingState.__init__

  def noting_perform(self, order, argument=None):
    if isinstance(order, host_messages.MakeStep | host_messages.Reform):
      progress = json.loads(order.progress)
      note(self, progress['step'], progress['rows'])
    return perform(self, order, argument)

  def noting_init(self, run_spec, learner, programs, restored, records, memory):
    init(self, run_spec, learner, programs, restored, records, memory)
    if restored.inner_state is not None:
      note(self, restored.start.step, restored.start.rows)

  def without_moments(self, *arguments):
    params, state, bases = restored(self, *arguments)
    return params, jax.tree.map(lambda x: 0 * x, state), bases

  SteppingState.perform = noting_perform
  SteppingState.__init__ = noting_init
  if os.environ.get('PLANTED'):
    ExchangePrograms.restored = without_moments
  runpy.run_module('diloco.learner', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
  main()
