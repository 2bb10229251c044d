# SPDX-License-Identifier: Apache-2.0
"""What a simulated fleet did, as the lanes of a timeline."""

from collections.abc import Iterator, Sequence

from diloco.pages.parts import Span, Timeline
from diloco.sim.happenings import Happenings
from diloco.sim.tally import Tally
from diloco.sim.wires import SYNCER


def timeline(
  name: str,
  title: str,
  tally: Tally,
  learners: Sequence[str],
  until_s: float,
  happenings: Happenings | None = None,
  notes: tuple[str, ...] = (),
) -> Timeline:
  """A lane per learner, and one of the syncer's rounds.

  Args:
    name: of the picture.
    title: above it.
    tally: of the run; what it kept is drawn.
    learners: names of the lanes, by learner id.
    until_s: what begins later is left out.
    happenings: what befell the fleet, if anything did.
    notes: below it.
  """
  happenings = happenings or Happenings()
  syncer = len(learners)
  spans = [Span(m, begin, end, 'step') for m, begin, end in tally.steps_spans]
  spans += [
    Span(m, begin, end, 'bootstrap') for m, begin, end in tally.bootstraps
  ]
  spans += [
    Span(m, each.begin_s, each.end_s, 'pause')
    for m, suspensions in sorted(happenings.suspensions.items())
    for each in suspensions
  ]
  spans += [
    Span(
      syncer if death.process == SYNCER else death.process,
      death.at_s,
      death.back_at_s,
      'dead',
    )
    for death in happenings.deaths
  ]
  for round_, due_s, quorum_s, merged_s in tally.round_spans:
    spans.append(Span(syncer, due_s, quorum_s, 'round', f'round {round_}'))
    spans.append(Span(syncer, quorum_s, merged_s, 'grace', f'round {round_}'))
  marks = tuple(
    (at_s, m, f'merged {round_}')
    for at_s, m, round_ in tally.merged_marks
    if at_s <= until_s
  )
  return Timeline(
    name,
    title,
    (*learners, 'syncer'),
    tuple(_cut(spans, until_s)),
    marks,
    notes,
  )


def _cut(spans: Sequence[Span], until_s: float) -> Iterator[Span]:
  """Those that begin before `until_s`, as far as they reach."""
  for span in spans:
    if span.begin_s < min(span.end_s, until_s):
      end_s = min(span.end_s, until_s)
      yield Span(span.lane, span.begin_s, end_s, span.kind, span.label)
