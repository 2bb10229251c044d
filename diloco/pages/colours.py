# SPDX-License-Identifier: Apache-2.0
"""Colours of figures and live pages, close to Okabe and Ito's palette.

It is safe for colour blindness; markers help in grey.
"""

COLOURS = (
  '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#333333',
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
