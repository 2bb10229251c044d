# SPDX-License-Identifier: Apache-2.0
"""What a dead syncer leaves on its simulated disk."""

import dataclasses
from typing import Any

from diloco.protocol.state import Ledger


@dataclasses.dataclass(frozen=True)
class Disk:
  """The ledger of the last close, and a checkpoint that may be older.

  Tuples are by fragment.
  """

  ledger: Ledger
  crcs: tuple[int, ...]  # Of the bytes at the ledger's versions.
  held: tuple[int, ...]  # Versions in the checkpoint,
  held_crcs: tuple[int, ...]  # and the CRCs of its bytes,
  saved: Any  # and those, as the syncer's contents saved them.
