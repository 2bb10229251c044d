# SPDX-License-Identifier: Apache-2.0
"""One public name, one class."""

import ast
import collections

from tests.repository import tree

# Events, messages and lines of a tape that mirror one another. What is on the
# wire or on a tape keeps its name, whatever else is called so.
MIRRORED = (
  'diloco/protocol/learner/events.py',
  'diloco/protocol/syncer/events.py',
  'diloco/protocol/messages.py',
  'diloco/protocol/host_messages.py',
  'diloco/protocol/shard_messages.py',
  'diloco/run/tape_events.py',
)


def test_public_classes_have_names_of_their_own():
  places = collections.defaultdict(list)
  for name in tree.tracked('diloco/*.py', 'launch/*.py'):
    for node in ast.parse((tree.ROOT / name).read_text()).body:
      if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
        places[node.name].append(name)
  assert len(places) > 400, 'the classes were not found'
  shared = {
    name: where
    for name, where in places.items()
    if len(where) > 1 and not set(where) <= set(MIRRORED)
  }
  assert not shared
