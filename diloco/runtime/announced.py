# SPDX-License-Identifier: Apache-2.0
"""Whether an announced payload is what a fragment takes, before the pull."""

from diloco.numerics import payload
from diloco.numerics.codec import Codec
from diloco.numerics.owners import Owners
from diloco.protocol import messages


def why_unfit(
  found: messages.Payload, fragment: int, codec: Codec, owners: Owners
) -> str | None:
  """Which codec or size it should have; None where it has them.

  Args:
    found: as a peer announced it.
    fragment: that it is of.
    codec: that it should be written by.
    owners: of the run's layout.
  """
  parts = tuple(
    payload.payload_bytes(owners.pieces(fragment, shard), codec)
    for shard in range(owners.shards)
  )
  nbytes = sum(parts)
  if owners.shards == 1:
    parts = ()
  found_parts = tuple(part.nbytes for part in found.parts)
  if (found.codec, found.nbytes) == (codec.name, nbytes):
    if found_parts == parts:
      return None
    return (
      f'parts of {found_parts} bytes are announced, fragment {fragment} has '
      f'{parts}'
    )
  return (
    f'{found.nbytes} bytes of {found.codec} are announced, fragment {fragment} '
    f'takes {nbytes} of {codec.name}'
  )
