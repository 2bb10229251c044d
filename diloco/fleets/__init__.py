# SPDX-License-Identifier: Apache-2.0
"""Fleets of chips that fail, and what training on them yields.

Start with `fleet`: Decoupled DiLoCo on a fleet, by the simulator; and
`synchronous`: systems that run as one program, and so wait.

  fleet         a fleet of learners, its outcome
  systems       the systems by name, how they recover, closed forms of goodput
  synchronous   data-parallel, elastic, DiLoCo in lockstep
  tally         counts what a simulated fleet does
  failures      when what breaks, for how long; stops and deaths from it
  speeds        lengths of inner steps
  traffic       bytes, links, bandwidth in theory
"""
