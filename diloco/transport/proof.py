# SPDX-License-Identifier: Apache-2.0
"""Verifies that bytes are what was announced; shared by all data planes."""

import zlib

import numpy as np

from diloco.protocol.messages import Payload
from diloco.transport import interface

PAYLOAD_BYTES_MAX = 1 << 36  # Larger announcements are not believed.
HANDLE_MAX = (1 << 60) - 1  # Two uuids of 63 bits fit above it.


def check_offer(handle: int, data: np.ndarray) -> None:
  """Raises `ValueError` if `data` cannot be offered under `handle`."""
  if not 0 <= handle <= HANDLE_MAX:
    raise ValueError(f'{handle=}, must be between 0 and 2^60 - 1')
  if data.dtype != np.uint8 or data.ndim != 1 or not data.size:
    raise ValueError(
      f'offer {handle}: {data.dtype}{list(data.shape)}, must be uint8 of one '
      'dimension and not empty'
    )
  if not data.flags.c_contiguous:
    raise ValueError(f'offer {handle}: the array is strided, must be dense')


def check_request(payload: Payload, origin: str) -> None:
  """Raises `WrongSize` or `NotOffered` for an impossible payload."""
  if not 0 < payload.nbytes <= PAYLOAD_BYTES_MAX:
    raise interface.WrongSize(
      f'payload {payload.handle} of {origin}: announced as {payload.nbytes} '
      f'bytes, must be between 1 and {PAYLOAD_BYTES_MAX}'
    )
  if not 0 <= payload.handle <= HANDLE_MAX:
    raise interface.NotOffered(f'no handle {payload.handle} at {origin}')


def check_arrival(payload: Payload, data: np.ndarray, origin: str) -> None:
  """Raises `WrongSize` or `Corrupt` if `data` is not `payload`."""
  check_size(payload, data.nbytes, origin)
  crc = zlib.crc32(data)
  if crc != payload.crc:
    raise interface.Corrupt(
      f'payload {payload.handle} of {origin}: crc {crc:#010x}, '
      f'announced {payload.crc:#010x}'
    )


def check_size(payload: Payload, nbytes: int, origin: str) -> None:
  """Raises `WrongSize` if the offer does not have the announced size."""
  if nbytes != payload.nbytes:
    raise interface.WrongSize(
      f'payload {payload.handle} of {origin}: {nbytes} bytes, '
      f'announced {payload.nbytes}'
    )
