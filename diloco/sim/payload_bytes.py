# SPDX-License-Identifier: Apache-2.0
"""How many bytes a value takes on the wire, by the name of its codec."""

SCALE_BYTES = {'bf16': 2, 'f32': 4}


def bytes_per_value(codec: str, block_size: int, scale: str) -> float:
  """Of a long tensor: bits / 8 + the scale of a block / its values.

  Args:
    codec: 'f32', 'bf16', or 'int' and its bits.
    block_size: values that share one scale.
    scale: of a block, 'bf16' or 'f32'.
  """
  if codec in ('f32', 'bf16'):
    return {'f32': 4.0, 'bf16': 2.0}[codec]
  bits = int(codec.removeprefix('int'))
  return bits / 8 + SCALE_BYTES[scale] / block_size


def fragment_shares(
  fragments: int, embedding_share: float
) -> tuple[float, ...]:
  """Share of the parameters in each fragment; the first is the embedding.

  Args:
    fragments: P.
    embedding_share: of a fragment of its own; 0: all are equal.
  """
  if not embedding_share or fragments == 1:
    return (1 / fragments,) * fragments
  rest = (1 - embedding_share) / (fragments - 1)
  return (embedding_share,) + (rest,) * (fragments - 1)
