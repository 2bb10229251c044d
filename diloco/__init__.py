# SPDX-License-Identifier: Apache-2.0
"""Decoupled DiLoCo in JAX: pre-training on machines that fail.

It implements *Decoupled DiLoCo for Resilient Distributed Pre-training*
(Douillard et al., 2026, arXiv 2604.21428). Wherever this repository says "the
paper", or cites an algorithm (Alg. 1 is the learner, Alg. 2 the syncer), an
equation, a table or a figure without a name, it means that one. What the paper
leaves open, and how it was decided here, stands in `docs/design.md` and
`diloco/protocol/README.md`.

Start with `protocol`, then `learner` and `syncer`, the two kinds of processes.

  protocol    the decisions, as two pure machines
  numerics    merge, codecs, outer and inner step
  models      what is trained
  data        what it is trained on
  transport   messages and bytes between processes
  checkpoint  what is on disk for a later process
  config      the configuration, checked
  metrics     what a run writes of itself
  monitoring  what its processes serve over HTTP
  run         what the processes of a run share
  learner     a process that trains
  syncer      the process that owns Θ; `syncer_shard` is one of its shards
  evaluation  losses, questions, text; `evaluate`, `evaluator`, `generate`
  replay      a run made again; `tape` prints its events
  simulator   the machines under a simulated clock; `swarm` draws scenarios
  fleets      fleets of chips that fail
  studies     questions to the simulator; `simulate` and `plan` ask them
  prediction  a recorded run, predicted
  sizing      memory and time before there is a chip
  lab         many learners with real gradients in one process
  sweeps      variants and seeds, in the lab or as real runs, compared
  pages       tables, charts, HTML
  report      pages of what was trained
  watch       a page of a run while it goes on
  bench       speed, stalls and sizes on one machine
  library     what `import diloco` offers besides; docs/api.md lists it all

Commands that prepare data or hand on results are `write_records`, `index_data`
and `export`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The same names for type checkers and editors.
  from diloco.learner.own_loop import Learner, Sync, start_syncer
  from diloco.library.questions import plan, simulate
  from diloco.library.run import Run, open_run
  from diloco.library.training import lab, train
  from diloco.numerics.trees import make_codec, merge, rda
  from diloco.protocol.config import ProtocolConfig
  from diloco.protocol.learner.machine import Learner as LearnerMachine
  from diloco.protocol.syncer.machine import Syncer as SyncerMachine
  from diloco.simulator.by_hand import ByHand
  from diloco.simulator.cluster import Cluster, Timing

__version__ = '0.2.0.dev0'

# Where each name of the library is: what it needs, such as jax, is imported
# once the name is asked for. A name stands here, in `__all__`, in the imports
# above and in docs/api.md.
PLACES = {
  'ByHand': 'diloco.simulator.by_hand:ByHand',
  'Cluster': 'diloco.simulator.cluster:Cluster',
  'Learner': 'diloco.learner.own_loop:Learner',
  'LearnerMachine': 'diloco.protocol.learner.machine:Learner',
  'ProtocolConfig': 'diloco.protocol.config:ProtocolConfig',
  'Run': 'diloco.library.run:Run',
  'Sync': 'diloco.learner.own_loop:Sync',
  'SyncerMachine': 'diloco.protocol.syncer.machine:Syncer',
  'Timing': 'diloco.simulator.cluster:Timing',
  'lab': 'diloco.library.training:lab',
  'make_codec': 'diloco.numerics.trees:make_codec',
  'merge': 'diloco.numerics.trees:merge',
  'open_run': 'diloco.library.run:open_run',
  'plan': 'diloco.library.questions:plan',
  'rda': 'diloco.numerics.trees:rda',
  'simulate': 'diloco.library.questions:simulate',
  'start_syncer': 'diloco.learner.own_loop:start_syncer',
  'train': 'diloco.library.training:train',
}
__all__ = [
  'ByHand',
  'Cluster',
  'Learner',
  'LearnerMachine',
  'ProtocolConfig',
  'Run',
  'Sync',
  'SyncerMachine',
  'Timing',
  'lab',
  'make_codec',
  'merge',
  'open_run',
  'plan',
  'rda',
  'simulate',
  'start_syncer',
  'train',
]


def __getattr__(name: str):
  if name not in PLACES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  place, _, attribute = PLACES[name].partition(':')
  return getattr(importlib.import_module(place), attribute)


def __dir__() -> list[str]:
  return sorted(PLACES)
