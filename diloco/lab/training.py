# SPDX-License-Identifier: Apache-2.0
"""One training run in one process, in simulated time, with reproducible bits.

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
  """Makes the run that the configuration describes.

  Args:
    blueprint: its configuration's section `lab` names the system.
    tell: called often with the global step and a loss of the model.
    timeline_s: events before this time are kept for a picture, in
      `Trained.tally`.
    journal: receives all events, including replayed ones.
    resumption: where the run resumes, and what it saves for the next process;
      None: it starts anew, and saves nothing.

  Raises:
    ConfigError: a fault of `config.faults` is impossible in this system.
    Diverged: the program does not repeat the interrupted run.
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
