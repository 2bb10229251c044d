# SPDX-License-Identifier: Apache-2.0
"""The disk of a simulated syncer, which survives its process."""

import dataclasses
from typing import Any

from diloco.protocol.state import Ledger


@dataclasses.dataclass(frozen=True)
class Disk:
  """The ledger of the last close, and a checkpoint that may be older.

  Tuples are by fragment.
  """

  ledger: Ledger
  crcs: tuple[int | None, ...]  # At the ledger's versions; None: unknown.
  held: tuple[int, ...]  # Versions in the checkpoint,
  held_crcs: tuple[int, ...]  # CRCs of its bytes,
  saved: Any  # and the bytes, as the contents saved them.
