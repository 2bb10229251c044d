# SPDX-License-Identifier: Apache-2.0
"""Checks an announced payload's codec and size before it is pulled."""

from collections.abc import Sequence

from diloco.numerics.codec import Codec
from diloco.protocol import messages


def why_unfit(
  found: messages.Payload,
  fragment: int,
  codec: Codec,
  parts: Sequence[int],
) -> str | None:
  """Returns which codec or sizes the payload should have; None if it has them.

  Args:
    found: the payload as the peer announced it.
    fragment: index of the fragment.
    codec: the codec that must have written it.
    parts: expected bytes of each part; see `cuts`.
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
