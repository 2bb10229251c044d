# SPDX-License-Identifier: Apache-2.0
"""A learner's process that notes each state that it gives or takes.

What is noted are the boxes of this host, in `$NOTED`: of a donor what its loop
held for the newcomer, of a newcomer Θ as it was adopted (the syncer's newer
fragments follow at once) and the inner state on its devices afterwards.
"""

import itertools
import os
import pathlib
import runpy

import numpy as np

from diloco.checkpoint.arrays import box_name, boxes_of, named
from diloco.learner.hosts.host_transfer import HostTransfer
from diloco.learner.train_state import SteppingState
from diloco.numerics import boxes
from diloco.protocol import host_messages

FOLDER = pathlib.Path(os.environ['NOTED'])


def note(what: str, held, slices, state):
  """Writes Θ by fragment and piece, and the inner state by leaf."""
  noted = {
    f'inner/{name}@{box_name(index, leaf.shape)}': np.array(values)
    for name, leaf in named(state).items()
    for index, values, _ in boxes_of(leaf)
  }
  for p, (each, needed) in enumerate(zip(held, slices)):
    for part in needed:
      box = boxes.text(part.ranges)
      name = f'theta/{p}.{each.version}/{part.piece.name}@{box}'
      noted[name] = each.theta[part.name]
  numbers = (FOLDER / f'{what}-{n}.npz' for n in itertools.count())
  np.savez(next(x for x in numbers if not x.exists()), **noted)


def main():
  donate, perform = HostTransfer.donate, SteppingState.perform
  end_fetch = HostTransfer.end_fetch
  adopted = {}

  def noting_donate(self, order, held, state):
    host = f'gave-{order.learner}-{self.replica.host}'
    note(host, held, self._slices.needed, state.inner_state)
    return donate(self, order, held, state)

  def noting_end_fetch(self, taken):
    end_fetch(self, taken)
    if taken:
      needed = self._slices.needed
      adopted.update(
        host=self.replica.host, held=self.replica.held(), needed=needed
      )

  def noting_perform(self, order, argument=None):
    result = perform(self, order, argument)
    if isinstance(order, host_messages.AdoptState):
      host = f'took-{self._learner}-{adopted["host"]}'
      note(host, adopted['held'], adopted['needed'], self.inner_state)
    return result

  HostTransfer.donate = noting_donate
  HostTransfer.end_fetch = noting_end_fetch
  SteppingState.perform = noting_perform
  runpy.run_module('diloco.learner', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
  main()
