# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a run; imports no jax.

Start with `local`, a run on this machine, or with `main`, which starts one
elsewhere too.

  main         the command: start, add, remove, watch
  job          a launch elsewhere as a value, and the flags that ask for it
  backends     where that is: one class each
  program      the roles of a run, and its processes here
  local        the command for one machine, and one run of it
  train        the same on a text of one's own
  preflight    what a run here would fail of; `epochs`: of its text
  variables    environment by role, and flags of accelerators
  chips        which of this machine's accelerators its learners get
  real_sweep   the runs of a sweep, one after the other
  chaos        the command that runs processes under a plan of faults
  supervisor   keeps its roles alive; exit codes, and what is done about them
  slices       which slices of a learner take part, and when one comes back
  coordination JAX's service for a learner of several slices
  rendezvous   what supervisor is for such a learner, across machines
  agent        starts its processes on one of its hosts
  heartbeat    whether a process of a slice goes on
  standby      processes that wait to be a learner's, with all imported
  parent_death ends children whose launcher died
  progress     shows a run as it goes
"""

import sys

# Installed, this is diloco.launch; its modules are named as in a checkout.
sys.modules.setdefault('launch', sys.modules[__name__])
