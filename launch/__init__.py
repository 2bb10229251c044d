# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a run; imports no jax.

Start with `local`, a run on this machine, or with `main`, which starts one
elsewhere too.

  main         the command: start, add, remove, watch
  launch_flags its flags, and the launch that they ask for
  job          a launch as a value: roles, accelerators, command lines
  backends     TPU VMs, GKE, Slurm
  local        the command for one machine; `session` is one run of it
  program      what such a run consists of
  chips        which of this machine's accelerators its learners get
  chaos        the command that runs processes under a plan of faults
  sweeps       the runs of a sweep, one after the other
  supervisor   keeps its roles alive; `role_processes` are those of one
  parent_death ends children whose launcher died
  exit_policy  what is done about an exit; `exit_codes` are the numbers
  progress     shows a run as it goes
"""

import sys

# Installed, this is diloco.launch; its modules are named as in a checkout.
sys.modules.setdefault('launch', sys.modules[__name__])
