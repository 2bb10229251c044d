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

Commands that prepare data or hand on results are `write_records`, `index_data`
and `export`.
"""

__version__ = '0.2.0.dev0'
