# SPDX-License-Identifier: Apache-2.0
"""A learner: the process that trains. `python -m diloco.learner`.

Start with `boundaries`: what is done between two steps. The threads beside it
are made by `syncer_client`.

  __main__        the flags; `hosts.host_main` makes a running learner of them
  boundaries      the order within a step, whoever makes the steps
  train_loop      inner steps with their boundaries
  train_state     what one host trains, saves and takes in; its held boundaries
  exchange_programs  compiled for a mesh: snapshot, blend, copy
  programs        the mesh, and the inner step
  local_delta     what of θ is its own, and how an updated Θ_p comes in
  syncer_client   the machine of `diloco.protocol.learner` and its threads
  transfers       jobs of the workers: encode, offer, pull, prove
  replica         the host's copy of Θ, proven by CRC
  connection      the session with the syncer, made again when lost
  restore         what a process begins with: a checkpoint, or nothing
  hosts/          the processes of a learner, of which there may be one
"""
