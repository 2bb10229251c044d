# SPDX-License-Identifier: Apache-2.0
"""Whether an announced payload is what a fragment takes, before the pull."""

from diloco.numerics import payload
from diloco.numerics.codec import Codec
from diloco.numerics.fragments import Layout
from diloco.protocol import messages


def why_unfit(
  found: messages.Payload, fragment: int, codec: Codec, layout: Layout
) -> str | None:
  """Which codec or size it should have; None where it has them.

  Args:
    found: as a peer announced it.
    fragment: that it is of.
    codec: that it should be written by.
    layout: of the run.
  """
  nbytes = payload.payload_bytes(layout.fragments[fragment], codec)
  if (found.codec, found.nbytes) == (codec.name, nbytes):
    return None
  return (
    f'{found.nbytes} bytes of {found.codec} are announced, fragment {fragment} '
    f'takes {nbytes} of {codec.name}'
  )
