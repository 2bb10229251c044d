# SPDX-License-Identifier: Apache-2.0
"""Whether an announced payload is what a fragment takes, before the pull."""

from collections.abc import Sequence

from diloco.numerics.codec import Codec
from diloco.protocol import messages


def why_unfit(
  found: messages.Payload,
  fragment: int,
  codec: Codec,
  parts: Sequence[int],
) -> str | None:
  """Which codec or size it should have; None where it has them.

  Args:
    found: as a peer announced it.
    fragment: that it is of.
    codec: that it should be written by.
    parts: the bytes that each should have, see `cuts`.
  """
  nbytes = sum(parts)
  parts = () if len(parts) == 1 else tuple(parts)
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
