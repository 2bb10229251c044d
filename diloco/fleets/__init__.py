# SPDX-License-Identifier: Apache-2.0
"""Fleets of chips that fail, and what training on them yields.

Start with `fleet`: Decoupled DiLoCo on a fleet, by the simulator.

  fleet      a fleet of learners, its outcome
  systems    the systems by name, how they recover, closed forms of goodput
  tally      counts what a simulated fleet does
  pauses     how long a learner that re-forms stands: measured, and the paper's
  failures   when what breaks, for how long; stops and deaths from it
  speeds     lengths of inner steps
  traffic    bytes, links, bandwidth in theory
"""
