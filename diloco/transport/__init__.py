# SPDX-License-Identifier: Apache-2.0
"""Moves messages and bytes between learners and syncer.

Start with `data_plane`: offer bytes under a handle, pull them once. Its
implementations are made by name, in `planes`:

  jax_transfer   jax.experimental.transfer, host to host, in the clear
  grpc_transfer  gRPC streams, with TLS and tokens
  memory         within one process

  wire             messages to bytes and, strictly, back
  control_channel  bounds and queues of the control plane's streams
  control_client   a learner's end of it
  control_server   the syncer's end, and its sessions
  host_channel     connections between the processes of one learner
  auth             TLS and tokens, read from files
  sockets          addresses, ports, bytes that were carried

Nothing is re-exported: `planes` imports jax only for the plane that needs it.
"""
