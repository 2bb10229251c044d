# SPDX-License-Identifier: Apache-2.0
"""Colours of pages and figures: Okabe and Ito's palette without its green.

The palette is safe for colour blindness. On a page green says that all is well,
and nothing else.
"""

COLOURS = (
  '#0072B2', '#D55E00', '#CC79A7', '#E69F00', '#56B4E9', '#7B61C4', '#8C564B',
)  # fmt: skip
# By the kind of a timeline's span. Steps alternate between two tints in a
# figure, so that one sees where one ends.
SPAN_COLOURS = {
  'step': '#3B8BC9',
  'waiting': '#D7D7D7',
  'bootstrap': '#8E3575',
  'pause': '#E69F00',
  'dead': '#B00020',
  'round': '#C9B77D',
  'grace': '#7A6A2F',
}


def lighter(colour: str, share: float = 0.35) -> str:
  """Mixes a colour with white, for a dark page."""
  channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
  mixed = (round(each + share * (255 - each)) for each in channels)
  return '#' + ''.join(f'{each:02x}' for each in mixed)
