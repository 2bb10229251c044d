# SPDX-License-Identifier: Apache-2.0
"""The parts of a page that real runs have, several side by side."""

from collections.abc import Iterator, Sequence

from diloco.pages.parts import Part
from diloco.reports import (
  run_charts,
  run_state,
  run_tables,
  run_timeline,
  syncer_tables,
)
from diloco.reports.recorded_run import RecordedRun


def paragraphs(runs: Sequence[RecordedRun]) -> Iterator[str]:
  """Yields a description of each run, with a missing end and gaps."""
  for run in runs:
    yield _what(run)
    if sentence := run_state.sentence(run):
      yield sentence
    if run.gaps:
      yield f'{run.label} has gaps: {" ".join(run.gaps)}'


def _what(run: RecordedRun) -> str:
  setup = run.setup
  counted = run.evaluation
  size = f'{counted.parameters:,} parameters, ' if counted else ''
  return (
    f'{run.label} is a run of {setup.name!r}: {size}{setup.learners} learners, '
    f'{setup.tokens_per_step:,} tokens in an inner step of each, '
    f'{setup.fragments} fragments.'
  )


def parts(runs: Sequence[RecordedRun]) -> Iterator[Part]:
  """Yields the parts of the page, results first."""
  yield run_tables.overview(runs)
  yield from run_charts.losses(runs)
  yield from run_charts.goodput(runs)
  for i, run in enumerate(runs):
    name = f'timeline-{i}' if len(runs) > 1 else 'timeline'
    timeline = run_timeline.of(run, name, f'{run.label}: learners and rounds')
    if timeline is not None:
      yield timeline
  yield run_tables.learners(runs)
  yield syncer_tables.rounds(runs)
  yield from run_charts.rounds(runs)
  yield syncer_tables.traffic(runs)
  yield syncer_tables.counts(runs)
  yield from run_tables.deaths(runs)
