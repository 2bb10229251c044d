# SPDX-License-Identifier: Apache-2.0
"""Colours of figures and live pages: Okabe and Ito's palette, and a violet.

The palette is safe for colour blindness; markers help in grey, and beside the
violet.
"""

COLOURS = (
  '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#7B61C4',
  '#333333',
)  # fmt: skip
# Steps alternate between two tints, so that one sees where one ends.
SPAN_COLOURS = {
  'step': '#3B8BC9',
  'odd step': '#86C1EA',
  'pause': '#E69F00',
  'dead': '#2B2B2B',
  'waiting': '#D7D7D7',
  'bootstrap': '#8E3575',
  'round': '#B9A66A',
  'grace': '#009E73',
}
