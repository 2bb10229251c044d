# SPDX-License-Identifier: Apache-2.0
"""Makes a data plane by name."""

from diloco.transport import auth, data_plane, grpc_transfer, memory

NAMES = ('jax_transfer', 'grpc', 'memory')

# All memory planes of a process share one network; its addresses are never
# reused.
_PROCESS_WIDE = memory.MemoryNetwork()


def make_plane(
  name: str,
  host: str,
  access: auth.Access = auth.OPEN,
  workers_max: int = grpc_transfer.WORKERS_MAX,
) -> data_plane.DataPlane:
  """Returns the data plane `name`, listening on `host`.

  Args:
    name: one of `NAMES`.
    host: IP literal or name of the interface that peers connect to; ignored by
      'memory'.
    access: credentials of peers; only 'grpc' checks them, the others accept
      every peer.
    workers_max: pulls that 'grpc' serves concurrently.

  Raises:
    ValueError: no such plane; or `host` does not resolve, or means every
      interface.
  """
  match name:
    case 'jax_transfer':
      # grpc and memory must work without jax installed.
      from diloco.transport import jax_transfer

      return jax_transfer.JaxTransferPlane(host)
    case 'grpc':
      return grpc_transfer.GrpcPlane(
        host, access=access, workers_max=workers_max
      )
    case 'memory':
      return memory.MemoryPlane(_PROCESS_WIDE)
  raise ValueError(f'data plane {name!r}, must be one of {NAMES}')
