# SPDX-License-Identifier: Apache-2.0
"""The data planes by name, with what a configuration must know of them.

Importing this imports none of them: a launcher without jax and gRPC reads it.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from diloco.transport import auth, data_plane


@dataclasses.dataclass(frozen=True)
class PlaneKind:
  """A kind of data plane.

  Attributes:
    make: takes host, access and the number of pulls that are served at a time,
      and returns the plane; imports what the plane needs.
    guarded: True if it checks the credentials of peers, and TLS protects its
      bytes, where credentials are given: it may listen where strangers could
      connect. False: it accepts every peer.
    between_processes: True if a configuration may name it.
    threads_min: CPU threads without which its transfers starve.
  """

  make: 'Callable[[str, auth.Access, int | None], data_plane.DataPlane]'
  guarded: bool = False
  between_processes: bool = True
  threads_min: int = 1


def _jax_transfer(host, access, workers_max):
  del access, workers_max
  from diloco.transport import jax_transfer

  return jax_transfer.JaxTransferPlane(host)


def _grpc(host, access, workers_max):
  from diloco.transport import grpc_transfer

  most = workers_max or grpc_transfer.WORKERS_MAX
  return grpc_transfer.GrpcPlane(host, access=access, workers_max=most)


def _memory(host, access, workers_max):
  del host, access, workers_max
  from diloco.transport import memory

  return memory.MemoryPlane(memory.PROCESS_WIDE)


PLANES = {
  # XLA's pool runs steps first; on one thread no transfer gets its turn.
  'jax_transfer': PlaneKind(_jax_transfer, threads_min=2),
  'grpc': PlaneKind(_grpc, guarded=True),
  'memory': PlaneKind(_memory, between_processes=False),
}
CONFIGURABLE = tuple(
  name for name, kind in PLANES.items() if kind.between_processes
)
GUARDED = tuple(name for name, kind in PLANES.items() if kind.guarded)


def make_plane(
  name: str,
  host: str,
  access: 'auth.Access | None' = None,
  workers_max: int | None = None,
) -> 'data_plane.DataPlane':
  """Returns the data plane `name`, listening on `host`.

  Args:
    host: IP literal or name of the interface that peers connect to; ignored by
      'memory'.
    access: credentials of peers, for a guarded plane. None: no credentials.
    workers_max: pulls that the plane serves concurrently, if it has a limit.

  Raises:
    ValueError: no such plane; or `host` does not resolve, or means every
      interface.
  """
  if name not in PLANES:
    raise ValueError(f'data plane {name!r}, must be one of {tuple(PLANES)}')
  from diloco.transport import auth

  return PLANES[name].make(host, access or auth.OPEN, workers_max)
