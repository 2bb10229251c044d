# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a run, from the files that the run has left."""

from collections.abc import Collection

import rich.box
import rich.console
import rich.markup
import rich.table

from diloco.metrics import ages, token_ledger
from diloco.metrics.summary import (
  Evaluation,
  RunSummary,
  bits,
  bytes_per_parameter,
)
from diloco.metrics.token_ledger import Row
from diloco.metrics.workdir import Workdir, learner_name
from launch.table import in_units


def report(
  workdir: Workdir,
  summary: RunSummary,
  evaluation: Evaluation,
  plot: str,
  tokens: Collection[Row] = (),
) -> rich.console.Group:
  """Everything that a newcomer should see of a finished run.

  Args:
    workdir: of the run.
    summary: as the syncer wrote it.
    evaluation: of the global model.
    plot: where the loss plot lies, or why there is none.
    tokens: the token ledger; none where no learner has a tape.
  """
  tables = (
    _losses(evaluation),
    _learners(summary),
    _run(summary, evaluation, tokens),
    _places(workdir, plot),
  )
  return rich.console.Group(*(part for view in tables for part in ('', view)))


def _losses(evaluation: Evaluation) -> rich.table.Table:
  view = _table('Validation loss of the global model')
  token = 'byte' if evaluation.bytes_per_token == 1 else 'token'
  for name in ('', f'nats/{token}', 'bits/byte'):
    view.add_column(name, justify='right' if name else 'left')
  for name, nats in (
    ('at the start', evaluation.initial_loss),
    ('at the end', evaluation.final_loss),
    ('unigram entropy of the text', evaluation.unigram_loss),
    ('bigram entropy of the text', evaluation.bigram_loss),
  ):
    if nats is not None:
      per_byte = bits(nats) / evaluation.bytes_per_token
      view.add_row(name, f'{nats:.3f}', f'{per_byte:.3f}')
  return view


def _learners(summary: RunSummary) -> rich.table.Table:
  view = _table(f'Learners, {summary.rounds} rounds')
  for name in (
    'learner', 'merged in', 'age', 'steps', 'tokens', 'starts',
    'longest stall', 'up', 'down',
  ):  # fmt: skip
    view.add_column(name, justify='left' if name == 'learner' else 'right')
  for learner in summary.learners:
    view.add_row(
      learner_name(learner.learner),
      f'{learner.rounds} ({learner.rounds / max(summary.rounds, 1):.0%})',
      '' if learner.age_steps is None else f'{learner.age_steps:.2f}',
      f'{learner.steps}',
      f'{learner.tokens:,}',
      f'{learner.incarnations}',
      f'{learner.stall_max_s * 1000:.0f} ms',
      in_units(learner.bytes_up),
      in_units(learner.bytes_down),
    )
  return view


def _run(
  summary: RunSummary, evaluation: Evaluation, tokens: Collection[Row]
) -> rich.table.Table:
  view = _table('Run', header=False)
  view.add_column('', no_wrap=True)
  view.add_column('')
  up = bytes_per_parameter(
    summary.bytes_up,
    summary.pulls_up,
    summary.fragments,
    evaluation.parameters,
  )
  down = bytes_per_parameter(
    summary.bytes_down,
    summary.pulls_down,
    summary.fragments,
    evaluation.parameters,
  )
  stall_s = max((x.stall_max_s for x in summary.learners), default=0.0)
  rows = (
    ('parameters', f'{evaluation.parameters:,}'),
    ('global steps', f'{summary.step}'),
    ('rounds', f'{summary.rounds}, {summary.refused} contributions refused'),
    ('age of what was merged', ages.text(summary.age_steps, summary.old_share)),
    ('longest step stall', f'{stall_s * 1000:.0f} ms'),
    (
      'bytes per parameter and round',
      f'up {_ratio(up)}, down {_ratio(down)} (f32 4, bf16 2)',
    ),
    ('wall time', f'{summary.wall_s:.0f} s'),
    (
      'goodput',
      f'{summary.goodput:.1%} of the learner time went into steps that count',
    ),
    ('uptime', f'{summary.uptime:.1%} of the time somebody trained'),
  )
  ledger = [('tokens', tokens_text(tokens))] if tokens else []
  returned = (
    (f'back again: {learner_name(each.learner)}', _plain(each.beginning))
    for each in summary.learners
    if each.incarnations > 1
  )
  for row in (*rows, *ledger, *returned):
    view.add_row(*row)
  return view


def tokens_text(rows: Collection[Row]) -> str:
  """Where they went; what is unexplained is a defect, and stands out."""
  text = token_ledger.text(token_ledger.total(rows))
  if missing := token_ledger.unexplained(rows):
    text += f', [bold red]{missing:,} unexplained[/]'
  return text


def _places(workdir: Workdir, plot: str) -> rich.table.Table:
  view = _table('Where to look', header=False)
  view.add_column('', no_wrap=True)
  view.add_column('', overflow='fold')
  view.add_row('logs', _plain(workdir.log('*').parent))
  view.add_row('scalars (JSONL)', _plain(workdir.metrics('*').parent))
  view.add_row('TensorBoard', _plain(workdir.tensorboard('*').parent))
  view.add_row('loss plot', _plain(plot))
  return view


def _table(title: str, header: bool = True) -> rich.table.Table:
  return rich.table.Table(
    title=title,
    show_header=header,
    title_justify='left',
    title_style='bold',
    box=rich.box.SIMPLE_HEAD,
    padding=(0, 1, 0, 0),
    show_edge=False,
  )


def _plain(text: object) -> str:
  """Text that others have chosen: brackets in it are no markup."""
  return rich.markup.escape(str(text))


def _ratio(value: float | None) -> str:
  return 'none' if value is None else f'{value:.3f}'
