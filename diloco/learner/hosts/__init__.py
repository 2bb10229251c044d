# SPDX-License-Identifier: Apache-2.0
"""The processes of a learner: one leads, the others, if any, follow.

Start with `host_group`: what the leading host tells the others before it does
it itself.

  host_main      a process from its flags on, also where it is the only one
  process_group  how the processes find each other, and join in one JAX program
  host_group     the other hosts, as the leading one sees them
  follower       a process that does not lead, from its start to its end
  host_transfer  the bytes that each process moves
"""
