# SPDX-License-Identifier: Apache-2.0
"""A report's charts and timelines as PNG, if matplotlib is installed.

It is an extra of this package; without it the rest of a report is made, and
it is said which pictures are missing.
"""

import importlib.util
import io

from diloco.pages.parts import Chart, Picture, ReportPage, Timeline

CHART_DPI = 150


def of(report: ReportPage) -> tuple[Picture, ...]:
  """The parts of a report that are pictures."""
  return tuple(p for p in report.parts if isinstance(p, Picture))


def missing(report: ReportPage) -> str | None:
  """Returns which pictures can't be drawn here and the remedy; None: all
  can.
  """
  names = ', '.join(f'{part.name}.png' for part in of(report))
  if not names or importlib.util.find_spec('matplotlib') is not None:
    return None
  return (
    f'not drawn: {names}; matplotlib is not installed: pip install matplotlib, '
    "or this package with its extra 'plot'"
  )


def draw(report: ReportPage) -> dict[str, bytes]:
  """PNG by the name of the part; empty where `missing` says why.

  The same report gives the same bytes, whatever the user's settings are.
  """
  if missing(report) is not None:
    return {}
  import matplotlib  # Heavy, and an extra.
  from matplotlib import style

  from diloco.pages import charts, intervals, timelines

  drawn = {}
  with style.context('default', after_reset=True), matplotlib.rc_context(STYLE):
    for part in of(report):
      match part:
        case Chart():
          page, dpi = charts.draw(part), CHART_DPI
        case Timeline():
          page, dpi = timelines.draw(part), timelines.DPI
        case _:
          page, dpi = intervals.draw(part), CHART_DPI
      buffer = io.BytesIO()
      page.savefig(buffer, format='png', dpi=dpi, metadata={'Software': None})
      drawn[part.name] = buffer.getvalue()
  return drawn


STYLE = {
  'font.family': 'DejaVu Sans',  # Comes with matplotlib.
  'font.size': 9.5,
  'axes.titlesize': 11,
  'axes.titleweight': 'bold',
  'figure.facecolor': 'white',
  'savefig.facecolor': 'white',
  'axes.edgecolor': '#777777',
}
