# SPDX-License-Identifier: Apache-2.0
"""The line of a close holds the fields of the effect, and nothing beside."""

import dataclasses

from diloco.protocol.syncer import events
from diloco.run.tape_events import closing_line


def test_what_a_close_has_cached_is_no_field_of_its_line():
  """Issue: the syncer ended where updates were made before the line."""
  names = [field.name for field in dataclasses.fields(events.Publish)]
  effect = events.Publish(**dict.fromkeys(names, ()))
  assert effect._known_steps == {}
  assert closing_line(effect, 7).crc == 7
