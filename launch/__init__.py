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
  chaos        the command that runs processes under a plan of faults
  supervisor   keeps its roles alive; a `unit` is the processes of one
  orphans      ends children whose launcher died
  exits        what exit codes mean; `exit_codes` are their numbers
  progress     shows a run as it goes; `plot` draws its losses
"""
