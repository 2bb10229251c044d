# SPDX-License-Identifier: Apache-2.0
"""One training run in one process, on a simulated clock; the same bits again.

Decoupled DiLoCo is the real machines around real arrays. Data-parallel is the
same inner step on the batches of all learners at once; a learner alone is that
with one of them.
"""

from collections.abc import Callable

from diloco.lab import faults
from diloco.lab.decoupled import Decoupled
from diloco.lab.journal import Journal
from diloco.lab.resumption import Resumption
from diloco.lab.together import Together
from diloco.lab.trained import Trained
from diloco.runtime.blueprint import Blueprint


def train(
  blueprint: Blueprint,
  tell: Callable[[int, float], None] = lambda *_: None,
  timeline_s: float = 0.0,
  journal: Journal | None = None,
  resumption: Resumption | None = None,
) -> Trained:
  """The run that the configuration describes.

  Args:
    blueprint: of the run; its section `lab` names the system.
    tell: takes the global step and a loss of the model, often.
    timeline_s: what happens before is kept for a picture, in `Trained.tally`.
    journal: is told of everything, also of what is not made again.
    resumption: where it goes on from, and what it leaves for the next process;
      None: it begins anew, and leaves nothing.

  Raises:
    ConfigError: `config.faults` has one that this system can't have.
    Diverged: the program makes another run of it than the one that was cut.
  """
  kills = faults.plan(blueprint.config)
  system = Decoupled if blueprint.config.lab.system == 'decoupled' else Together
  return system(
    blueprint,
    kills,
    tell,
    timeline_s,
    journal or Journal(),
    resumption or Resumption(),
  ).run()
