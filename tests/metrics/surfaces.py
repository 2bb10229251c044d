# SPDX-License-Identifier: Apache-2.0
"""The figures of a run as each surface shows them, and where they differ."""

import json
import re
from collections.abc import Collection, Mapping

import pytest

from diloco.metrics import figures, status
from diloco.metrics.status import RunStatus
from diloco.metrics.workdir import SYNCER, Workdir
from diloco.monitoring import monitor
from diloco.report import to_wandb
from diloco.watch.folders import FollowedFolders
from tests.metrics import board_events

Shown = Mapping[str, Mapping[str, float]]  # Surface -> figure -> number.


def shown(workdir: Workdir) -> dict[str, dict[str, float]]:
  """Returns every figure that a run's surfaces show, by name."""
  told = status.of_run(workdir)
  page = FollowedFolders([workdir.root]).page()
  (table,) = (x for x in page.parts if x.name == 'figures')
  on_page = {row[0]: row[2] for row in table.rows}
  on_board = {
    value.tag: value.simple_value
    for path in sorted(workdir.tensorboard(SYNCER).glob('events*'))
    for event in board_events.read(path)
    for value in event.summary.value
  }
  samples = dict(
    re.findall(r'^diloco_(\w+){run="[^"]*"} (\S+)$', monitor.text(told), re.M)
  )
  by_key = {
    'page': (on_page, lambda figure: figure.label),
    '/metrics': (samples, lambda figure: figure.sample),
    'TensorBoard': (on_board, lambda figure: figure.curve),
    'W&B': (to_wandb.known_figures(told), lambda figure: figure.name),
    'status.json': (
      json.loads(workdir.status.read_text()),
      lambda figure: figure.name,
    ),
    'summary.json': (
      json.loads(workdir.summary.read_text()),
      lambda figure: figure.name,
    ),
  }
  return {
    surface: {
      figure.name: float(found[key(figure)])
      for figure in figures.RUN
      if found.get(key(figure)) is not None
    }
    for surface, (found, key) in by_key.items()
  }


def differing(
  told: RunStatus, surfaces: Shown, terminal: str, but: Collection[str] = ()
) -> set[tuple[str, str]]:
  """Returns each (surface, figure) whose number is not that of the table.

  Args:
    terminal: what the launcher has printed, with the table at the end.
    but: names of figures that are not compared.
  """
  own = figures.values(figures.RUN, told)
  found = {
    (surface, name)
    for surface, numbers in surfaces.items()
    for name, x in numbers.items()
    # TensorBoard keeps f32.
    if name not in but and x != pytest.approx(own[name], rel=1e-6)
  }
  printed = ' '.join(terminal.split())
  return found | {
    ('terminal', each.name)
    for each in figures.shown(figures.RUN, figures.END)
    if own[each.name] is not None
    and ' '.join(f'{each.label} {each.text_in(told)}'.split()) not in printed
  }
