# SPDX-License-Identifier: Apache-2.0
"""The event tape: every decision of the syncer as one JSON line."""

import dataclasses
import json
import pathlib
import time

from diloco.protocol import syncer_io

# The effects that are decisions; the others follow from them.
DECISIONS = (
  syncer_io.Greet,
  syncer_io.Merge,
  syncer_io.Publish,
  syncer_io.Record,
  syncer_io.End,
)


class Tape:
  """Appends to a file; a line is written at once."""

  def __init__(self, path: pathlib.Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open('ab', buffering=0)

  def write(self, effect: syncer_io.Effect):
    """Writes `effect` if it is a decision."""
    if isinstance(effect, DECISIONS):
      line = {
        'time_s': time.time(),
        'kind': type(effect).__name__,
        **dataclasses.asdict(effect),
      }
      self._file.write(json.dumps(line).encode() + b'\n')

  def close(self):
    self._file.close()
