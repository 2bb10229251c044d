# SPDX-License-Identifier: Apache-2.0
"""Output for humans: terminal tables, figures, self-contained pages.

Start with `parts`: a `ReportPage` is tables, charts, timelines and paragraphs
as values; the other modules draw it. There is one page, `page.html`: of a run
that goes on or is over, of the lab, of a sweep, of a simulation.

  page         one HTML file that loads nothing else; CSV and JSON beside it
  terminal     in a terminal, of whatever width
  figures      charts and timelines by matplotlib, for notebooks and loss.png
  text_tables  tables of other commands' output
"""
