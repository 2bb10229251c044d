# SPDX-License-Identifier: Apache-2.0
"""Runs real processes under a seeded plan of faults: python -m launch.chaos …

Start with `diloco.faults`, the kinds; a kind acts on a stage, of real processes
or of the simulated ones of `diloco.prediction.twin`. The verdict is made from
the run's folder alone.

  __main__    the command
  fault_plan  draws a plan from a seed; pure
  stage       real processes: signals, limits, clocks, their relay
  relay       carries their connections, cut, slow, late or lossy, and counts
  clock       a wall clock that can be set wrong from outside
  conductor   performs a plan, and writes down what happened
  live_run    processes followed from outside, by their files
  baselines   the same run without faults
  record      what is read of a run's folder, and what each fault did
  checks      what any run must satisfy
  verdict     the checks of a chaos run, as data, and its tables
"""
