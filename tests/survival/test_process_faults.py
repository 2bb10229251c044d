# SPDX-License-Identifier: Apache-2.0
"""Processes that are stopped or killed: the remaining ones go on."""

import signal

import pytest

from diloco.protocol.timeouts import SILENCE_FLOOR_S
from tests.processes.processes import ENDLESS, SLOW, START_S, Processes
from tests.survival.survival import BOWL

pytestmark = pytest.mark.beside

STOP_S = 6.0
BEFORE_S = 3.0  # The time over which the rate before a fault is taken.
SILENT_S = 5.0  # Until one is given up; somewhat less than the stop.


@pytest.fixture(scope='module')
def running(tmp_path_factory):
  """A syncer and two learners. K = M: with one gone the quorum is one.

  No grace window is open at any time, whose deadline would reveal that the
  syncer was away.
  """
  overrides = (
    f'protocol.patience={SILENT_S / SILENCE_FLOOR_S}',
    'protocol.grace_cap_steps=0.0',
    'protocol.quorum=2',
    'checkpoint.learner_every_steps=0',  # Its import may hold a process.
  )
  root = tmp_path_factory.mktemp('faults')
  with Processes(root, *BOWL, *SLOW, *ENDLESS, *overrides) as processes:
    syncer = processes.syncer()
    learners = [processes.learner(m) for m in (0, 1)]
    for m in (0, 1):
      processes.until_merged(m)
    yield processes, syncer, learners


def test_learners_train_on_while_the_syncer_is_stopped(running):
  """The syncer is stopped, and the learners keep their pace.

  No learner is given up, nothing is restarted, no session is renewed, and once
  the syncer resumes, so do the rounds: its own absence is not the learners'.
  """
  processes, syncer, learners = running
  processes.spend(BEFORE_S)
  left, joined = (len(processes.tape(kind)) for kind in ('left', 'joined'))
  syncer.send(signal.SIGSTOP)
  stopped_s = max(processes.steps(m)[-1]['time_s'] for m in (0, 1))
  processes.spend(STOP_S)
  syncer.send(signal.SIGCONT)
  closed = len(processes.tape('Publish'))
  for m in (0, 1):
    times_s = [step['time_s'] - stopped_s for step in processes.steps(m)]
    before = sum(-BEFORE_S <= t <= 0 for t in times_s) / BEFORE_S
    meanwhile = sum(0 < t <= STOP_S for t in times_s) / STOP_S
    # The cores are shared; one that waits for the syncer makes next to none.
    assert meanwhile >= before / 5, f'{m=} {before=} {meanwhile=} steps/s'
  for m in (0, 1):
    processes.until_merged(m)
  processes.until(
    lambda: len(processes.tape('Publish')) >= closed + 10,
    START_S,
    'rounds go on',
  )
  assert [each.exit_code for each in learners] == [None, None]
  assert len(processes.tape('left')) == left
  assert len(processes.tape('joined')) == joined


def test_silent_learner_is_given_up_and_joins_again(running):
  """Silence ends the incarnation; a later one is merged again."""
  processes, _, learners = running
  earlier = len(processes.tape('left'))
  learners[1].send(signal.SIGSTOP)
  processes.until(
    lambda: any(
      line['learner'] == 1 and line['reason'].startswith('silent')
      for line in processes.tape('left')[earlier:]
    ),
    START_S,
    'learner 1 is given up as silent',
  )
  first = _incarnation(processes, 1)
  processes.until_merged(0, rounds=5)
  assert _incarnation(processes, 1) == first
  learners[1].send(signal.SIGCONT)
  processes.until(
    lambda: _incarnation(processes, 1) > first,
    START_S,
    'learner 1 is merged again, with a higher incarnation',
  )
  assert [each.exit_code for each in learners] == [None, None]


def _incarnation(processes: Processes, learner: int) -> int:
  """The one that the last round with the learner merged."""
  shares = processes.merged(learner)[-1]['shares']
  return next(s['incarnation'] for s in shares if s['learner'] == learner)
