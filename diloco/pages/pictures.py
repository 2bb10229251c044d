# SPDX-License-Identifier: Apache-2.0
"""A report's pictures as PNG, if matplotlib is installed.

It is an extra of this package; without it the rest of a report is made, and
the report says which pictures are missing.
"""

import importlib.util
import io

from diloco.pages.parts import Picture, ReportPage

STYLE = {
  'font.family': 'DejaVu Sans',  # Comes with matplotlib.
  'font.size': 9.5,
  'axes.titlesize': 11,
  'axes.titleweight': 'bold',
  'figure.facecolor': 'white',
  'savefig.facecolor': 'white',
  'axes.edgecolor': '#777777',
}


def missing(report: ReportPage) -> str | None:
  """Returns which pictures can't be drawn here and the remedy; None: all
  can.
  """
  names = ', '.join(f'{part.name}.png' for part in _pictures(report))
  if not names or importlib.util.find_spec('matplotlib') is not None:
    return None
  return (
    f'not drawn: {names}; matplotlib is not installed: pip install matplotlib, '
    "or this package with its extra 'plot'"
  )


def draw(report: ReportPage) -> dict[str, bytes]:
  """Returns PNG by the name of the part; none where `missing` says why.

  The same report gives the same bytes, whatever the user's settings are.
  """
  pictures = _pictures(report)
  if not pictures or missing(report) is not None:
    return {}
  import matplotlib  # Heavy, and an extra.
  from matplotlib import style

  from diloco.pages import figures

  drawn = {}
  with style.context('default', after_reset=True), matplotlib.rc_context(STYLE):
    for part in pictures:
      page, buffer = figures.draw(part), io.BytesIO()
      page.savefig(
        buffer, format='png', dpi=figures.DPI, metadata={'Software': None}
      )
      drawn[part.name] = buffer.getvalue()
  return drawn


def _pictures(report: ReportPage) -> list[Picture]:
  return [part for part in report.parts if isinstance(part, Picture)]
