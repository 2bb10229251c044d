# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a soak: each check by its name, with findings."""

import dataclasses
from collections.abc import Sequence

import rich.box
import rich.table

SHOWN_MAX = 5  # Findings of one check; all of them are in the JSON file.


@dataclasses.dataclass(frozen=True)
class Check:
  """One thing that must hold."""

  name: str
  findings: Sequence[str]  # None where it holds.
  note: str = ''  # What was measured, good or bad.


def show(title: str, checks: Sequence[Check]) -> rich.table.Table:
  """One row per check."""
  view = rich.table.Table(
    title=title,
    title_justify='left',
    box=rich.box.SIMPLE_HEAD,
    padding=(0, 1, 0, 0),
    show_edge=False,
  )
  view.add_column('check', no_wrap=True)
  view.add_column('holds', no_wrap=True)
  view.add_column('found', overflow='fold')
  for check in checks:
    lines = [check.note] if check.note else []
    lines += check.findings[:SHOWN_MAX]
    if (more := len(check.findings) - SHOWN_MAX) > 0:
      lines.append(f'and {more} more')
    holds = 'NO' if check.findings else 'yes'
    view.add_row(check.name, holds, '\n'.join(lines))
  return view
