# SPDX-License-Identifier: Apache-2.0
"""Tables in terminals of 40 to 200 columns, and what a cell says."""

import io
import math

import pytest
import rich.console

from diloco.pages import parts, terminal
from diloco.pages.parts import Column, ReportPage, Table
from tests.pages import sample_report

ON_EIGHTY = """
Goodput in % of the allocated time
system                 learners      chips   simulated  closed form  paper
──────────────────────────────────────────────────────────────────────────
data-parallel                 1  1,200,000  24.7 ± 0.3         24.7     27
elastic data-parallel         1  1,200,000  55.3 ± 0.2         55.3     58
Decoupled DiLoCo              8  1,200,000  89.0 ± 0.1         89.0     88
a <system> & more            16  2,400,000           —            —      —
- Means over 3 seeds ± their standard deviation.
- A < B & C.
"""


def shown(report, width):
  stream = io.StringIO()
  console = rich.console.Console(
    file=stream, width=width, color_system=None, highlight=False, markup=False
  )
  terminal.show(report, console)
  return stream.getvalue()


@pytest.mark.parametrize('width', [40, 60, 80, 100, 200])
def test_no_line_is_longer_than_the_terminal(width):
  lines = shown(sample_report.report(), width).splitlines()
  # The command can be copied: it is not broken.
  assert max(len(x) for x in lines if not x.startswith('Again')) <= width


def test_a_table_on_eighty_columns():
  text = shown(sample_report.report(), 80)
  begin = text.index('Goodput in %')
  assert text[begin : text.index('\n\n', begin)] == ON_EIGHTY.strip()


def test_a_wide_table_is_cut_into_blocks_that_repeat_its_first_column():
  text = shown(sample_report.report(), 60)
  assert text.count('learner 2') == text.count('none') > 2
  for number in ('285.7', '166.7', '105.263', '90.909'):
    assert text.count(number) <= 1


def test_markup_is_text():
  table = Table('t', '[bold]t[/bold]', (Column('[red]x'),), (('[/]',),))
  text = shown(ReportPage('n', '[i]', 'c', (), (table,)), 80)
  assert '[bold]t[/bold]' in text
  assert '[red]x' in text
  assert '[/]' in text


@pytest.mark.parametrize(
  ('cell', 'text'),
  [
    (None, '—'),
    ('', '—'),
    ('two\nlines', 'two lines'),
    (1_200_000, '1,200,000'),
    (1234.567, '1,234.6'),
    (-0.04, '0.0'),
    (-0.06, '-0.1'),
    (math.inf, '∞'),
    (math.nan, 'nan'),
  ],
)
def test_a_cell(cell, text):
  assert parts.text_of(cell, 1) == text


def test_spreads_stand_in_one_column():
  table = Table(
    't',
    't',
    (Column('x', spread='s'), Column('s', hidden=True)),
    ((9.0, 10.25), (10.0, 1.0), (None, None), (5.0, None)),
  )
  (column,) = parts.shown(table)
  assert column.texts == ('9.0 ± 10.2', '10.0 ± 1.0 ', '—', '5.0       ')
  assert column.numeric
