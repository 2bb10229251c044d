# SPDX-License-Identifier: Apache-2.0
"""The real protocol machines in a simulated cluster; free of jax.

Start with `cluster`: syncer and learners under a simulated clock. `swarm`
runs random scenarios of it: `python -m diloco.swarm`.

  engine             the clock, alarms, inner steps, what an observer is told
  cluster            processes, deaths, messages between them, durations
  simulated_syncer   a process of the syncer, or of a shard
  simulated_learner  a process of a learner
  contents           what processes hold: symbols here, arrays in the lab
  network            how long bytes take
  observer           what must hold of the whole cluster
  invariants         what must hold at the syncer
  scenario, swarm    what one seed draws, and its run
"""
