# SPDX-License-Identifier: Apache-2.0
"""What stands for a run's name, data and bytes where there are no arrays."""

import zlib

RUN = 'simulated'
FINGERPRINTS = {'config': 'c', 'layout': 'l', 'data': 'd'}


def crc_of(fragment: int, version: int) -> int:
  """Stands for the bytes of Θ_p where nothing was ever lost."""
  crc = fragment
  for v in range(1, version + 1):
    crc = crc_after(crc, v)
  return crc


def crc_after(crc: int, version: int) -> int:
  """Stands for those after an outer update to `version`.

  A function of the bytes before, so that an update that meets other bytes
  than those it was made for is found out, as in a real run.
  """
  return zlib.crc32(f'{crc} {version}'.encode())
