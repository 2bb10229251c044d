# SPDX-License-Identifier: Apache-2.0
"""Output for humans: terminal tables, figures, self-contained pages.

Start with `parts`: a `ReportPage` is tables, charts, timelines and paragraphs
as values; the other modules draw it.

  terminal      in a terminal, of whatever width
  page          one HTML file that loads nothing else
  colours       of figures and of live pages
  figures       charts, intervals and timelines, by matplotlib
  text_tables   tables of other commands' output
  pictures      the same as PNG, where matplotlib is installed
  report_files  all of it into a folder, with CSV and JSON
"""
