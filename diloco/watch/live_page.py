# SPDX-License-Identifier: Apache-2.0
"""Fills the page of a run: one HTML file that loads nothing else.

The same page is served, and asks for the state again and again, or is written
with the state in it.
"""

import html
import json
import pathlib
import re
from collections.abc import Mapping

from diloco.pages import page
from diloco.pages.colours import COLOURS, SPAN_COLOURS

TEMPLATE = pathlib.Path(__file__).with_name('live_page.html')
SPANS = ('round', 'grace', 'bootstrap', 'pause')
LIGHTER = 0.35  # Share of white in colours on a dark page.


def as_json(state: Mapping) -> str:
  """Returns the state as compact JSON."""
  return json.dumps(state, separators=(',', ':'), allow_nan=False)


def of(state: Mapping, every_s: float | None) -> str:
  """Returns the page.

  Args:
    state: of `FollowedRun.state`, shown at first.
    every_s: how often the page asks for a new state; None: never.
  """
  filled = {
    'title': html.escape(f'{state["run"]}: {state["folder"]}'),
    'style': page.STYLE,
    'light': _variables(lambda colour: colour),
    'dark': _variables(_lighter),
    'every_ms': str(round(1000 * every_s) if every_s else 0),
    # '</script>' in a name must not end the element.
    'state': as_json(state).replace('<', '\\u003c'),
  }
  text = TEMPLATE.read_text(encoding='utf-8')
  return re.sub(r'{{(\w+)}}', lambda mark: filled[mark[1]], text)


def _variables(shade) -> str:
  """Returns the colours of learners and spans as CSS variables."""
  found = {f'--c{i}': colour for i, colour in enumerate(COLOURS[:-1])}
  found |= {f'--{name}': SPAN_COLOURS[name] for name in SPANS}
  return ' '.join(f'{name}: {shade(each)};' for name, each in found.items())


def _lighter(colour: str) -> str:
  parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
  mixed = (round(part + LIGHTER * (255 - part)) for part in parts)
  return '#' + ''.join(f'{part:02x}' for part in mixed)
