# SPDX-License-Identifier: Apache-2.0
"""Processes that are stopped or killed: the remaining ones go on."""

import itertools
import signal

import pytest

from diloco.metrics import names
from diloco.protocol.timeouts import SILENCE_FLOOR_S
from tests.processes.processes import ENDLESS, SLOW, START_S, Processes

pytestmark = pytest.mark.beside

STOP_S = 10.0
BEFORE_S = 3.0  # The time over which the rate before a fault is taken.


def test_learners_train_on_while_the_syncer_is_stopped(tmp_path):
  """The syncer is stopped for 10 s, and the learners keep their pace.

  No learner is given up, nothing is restarted, no session is renewed, and once
  the syncer resumes, so do the rounds. The stop is somewhat longer than the
  silence that ends a session: the syncer's own absence is not the learners'. No
  grace window is open at that time, whose deadline would reveal the absence.
  """
  overrides = (
    f'protocol.patience={0.8 * STOP_S / SILENCE_FLOOR_S}',
    'protocol.grace_cap_steps=0.0',
  )
  with Processes(tmp_path, *SLOW, *ENDLESS, *overrides) as processes:
    syncer = processes.syncer()
    learners = [processes.learner(m) for m in (0, 1)]
    for m in (0, 1):
      processes.until_merged(m)
    processes.spend(BEFORE_S)
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
    assert processes.tape('left') == []
    assert len(processes.tape('joined')) == 2


def test_learners_train_on_when_the_syncer_is_killed(tmp_path):
  """Issue: syncer killed, the learners' steps go on at their own pace."""
  with Processes(tmp_path, *SLOW, *ENDLESS) as processes:
    syncer = processes.syncer()
    learners = [processes.learner(m) for m in (0, 1)]
    for m in (0, 1):
      processes.until_merged(m)
    syncer.send(signal.SIGKILL)
    assert processes.exit_code(syncer) == -signal.SIGKILL
    done = [len(processes.steps(m)) for m in (0, 1)]
    processes.until(
      lambda: all(len(processes.steps(m)) >= done[m] + 50 for m in (0, 1)),
      START_S,
      'both learners make 50 steps without a syncer',
    )
    assert [each.exit_code for each in learners] == [None, None]
    # Its successor hears of these steps too: each report has the time of all.
    processes.syncer(name='syncer-again')
    for m in (0, 1):
      processes.until_merged(m)
    worked = processes.tape('Worked')[-1]['learners']
    made = [len(processes.steps(m)) for m in (0, 1)]
    for work in worked:
      m = work['learner']
      # A step may be reported just before it is on the disk.
      processes.until(
        lambda m=m: len(processes.steps(m)) > made[m] + 1,
        START_S,
        f'learner {m} makes two more steps',
      )
      _expect_all_steps(work['made_s'], processes.steps(m), done[m] + 50)


def _expect_all_steps(made_s: float, steps: list[dict], least: int):
  """A sum of the first so many, `least` or more."""
  sums_s = itertools.accumulate(
    step[names.STEP_TIME] - min(step[names.STEP_TIME], step[names.STALL_TIME])
    for step in steps
  )
  found = [
    many
    for many, sum_s in enumerate(sums_s, start=1)
    if abs(sum_s - made_s) < 1e-6
  ]
  assert found, made_s
  assert found[0] >= least


def test_silent_learner_is_given_up_and_joins_again(tmp_path):
  """Silence ends the incarnation; a later one is merged again.

  K = 2 of 2 learners: with one of them gone the quorum is one.
  """
  overrides = (
    'protocol.quorum=2',
    f'protocol.patience={1.0 / SILENCE_FLOOR_S}',
  )
  with Processes(tmp_path, *SLOW, *ENDLESS, *overrides) as processes:
    processes.syncer()
    learners = [processes.learner(m) for m in (0, 1)]
    for m in (0, 1):
      processes.until_merged(m)
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
