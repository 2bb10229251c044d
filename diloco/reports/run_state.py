# SPDX-License-Identifier: Apache-2.0
"""Determines if a run has finished, and describes one that has not."""

import datetime
import math

from diloco.pages import words
from diloco.reports.recorded_run import RecordedRun

FINISHED = 'finished'
STOPPED = 'stopped'
GOING = 'no end'


def state(run: RecordedRun) -> str:
  """Returns the state in a word or two."""
  if run.ended or run.summary:
    return FINISHED
  lasts = [lives[-1] for lives in run.lives.values() if lives]
  if lasts and all(life.ended_s < math.inf for life in lasts):
    return STOPPED
  return GOING


def sentence(run: RecordedRun) -> str | None:
  """Returns a sentence on a run that did not finish; None if it did."""
  how = state(run)
  if how == FINISHED:
    return None
  why = {
    STOPPED: 'all its processes ended before it was over',
    GOING: 'it is still going, or everything was killed at once',
  }[how]
  if not run.steps:
    return f'{run.label} did not finish: {why}. No inner step of it is known.'
  step = max((each.step for each in run.rounds), default=0)
  last = datetime.datetime.fromtimestamp(run.last_s, datetime.UTC)
  return (
    f'{run.label} did not finish: {why}. Shown is what it had written, up to '
    f'step {step} of {run.setup.total_steps}, {words.duration(run.until_s)} '
    f'after its first learner was ready; its last line is of '
    f'{last:%Y-%m-%d %H:%M:%S} UTC.'
  )
