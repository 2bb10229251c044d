# SPDX-License-Identifier: Apache-2.0
"""Runs real processes under a seeded plan of faults: python -m launch.chaos …

Start with `diloco.faults`, the kinds; a kind acts on a stage, of real processes
or of the simulated ones of `diloco.prediction.twin`. The verdict is made from
the run's folder alone.

  __main__    the command
  fault_plan  draws a plan from a seed; pure
  stage       real processes: followed by files, hit by signals and limits;
              performs a plan, and writes down what happened
  relay       carries their connections, cut, slow, late or lossy, and counts
  clock       a wall clock that can be set wrong from outside
  checks      what must hold of a run, read from its folder
"""
