# SPDX-License-Identifier: Apache-2.0
"""The checks of a soak find what is planted, and nothing in a good run."""

import pytest

from launch.chaos import checks
from launch.chaos.live_run import WrittenStep
from launch.supervisor import ProcessEvent
from tests.chaos import soak_run

pytestmark = pytest.mark.beside

TOKENS = 10  # Per step.


def share(learner, step, steps, base, incarnation=1):
  return {
    'learner': learner,
    'incarnation': incarnation,
    'base_version': base,
    'c_steps': steps,
    'c_tokens': steps * TOKENS,
    'step': step,
  }


def close(round_, version, *shares, fragment=0):
  return {
    'kind': 'Publish',
    'round': round_,
    'fragment': fragment,
    'version': version,
    'shares': shares,
  }


def trained(count, incarnation=1, first=1):
  return [
    WrittenStep(float(i), incarnation, i, 0.02, 0.0)
    for i in range(first, count + 1)
  ]


def good():
  return [
    {'kind': 'ready', 'learner': 0},
    close(1, 1, share(0, 4, 4, 0), share(1, 3, 3, 0)),
    close(2, 1, share(0, 6, 6, 0), fragment=1),
    close(3, 2, share(0, 9, 3, 1)),
  ]


def test_a_good_run_has_no_findings():
  tape, steps = good(), {0: trained(9), 1: trained(3)}
  assert checks.versions(tape) == []
  assert checks.whole_steps(tape, TOKENS) == []
  assert checks.merged_once(tape) == []
  assert soak_run.steps_merged_once(tape, steps) == []
  assert checks.tokens_balance(tape, steps, TOKENS) == []


@pytest.mark.parametrize(('version', 'after'), [(1, 2), (2, 2), (4, 2)])
def test_a_version_that_falls_stays_or_jumps_is_found(version, after):
  (finding,) = checks.versions([*good(), close(5, version)])
  assert finding == f'fragment 0: version {version} after {after}, in round 5'


def test_a_part_of_a_step_is_found():
  planted = share(0, 12, 3, 2) | {'c_tokens': 29}
  (finding,) = checks.whole_steps([*good(), close(5, 3, planted)], TOKENS)
  assert 'learner 0 is merged with 29 tokens of 3 steps of 10' in finding


def test_a_contribution_that_is_merged_twice_is_found():
  tape = [*good(), close(5, 3, share(0, 12, 3, base=1))]
  (finding,) = checks.merged_once(tape)
  assert finding.endswith('base version 1: merged in rounds 3 and 5')


def test_a_step_that_is_merged_in_two_sessions_is_found():
  """The process says hello again, and offers what was merged before."""
  steps = {0: [*trained(9), *trained(12, incarnation=2, first=10)]}
  tape = [*good(), close(5, 3, share(0, 12, 5, base=2, incarnation=2))]
  assert checks.merged_once(tape) == []
  (finding,) = soak_run.steps_merged_once(tape, steps)
  assert 'step 8 is merged in round 5, and was in round 3' in finding


def test_steps_of_another_process_are_others():
  steps = {0: [*trained(9), *trained(5, incarnation=2)]}
  tape = [*good(), close(5, 3, share(0, 5, 5, base=2, incarnation=2))]
  assert soak_run.steps_merged_once(tape, steps) == []


def test_tokens_that_nobody_trained_are_found():
  steps = {0: trained(4), 1: trained(3)}  # 4 + 2 unwritten < 4 + 3 merged.
  (finding,) = checks.tokens_balance(good(), steps, TOKENS)
  assert (
    finding == 'learner 0, fragment 0: 70 tokens merged, at most 60 trained'
  )


@pytest.mark.parametrize(
  ('story', 'over', 'finding'),
  [
    ([('killed', ''), ('exited', 'died of SIGKILL; restart 1')], False, None),
    ([('stopped', 'SIGTERM'), ('exited', 'exited with code 143')], False, None),
    ([('exited', 'exited with code 0')], True, None),
    ([('exited', 'exited with code 0')], False, 'exited with code 0'),
    (
      [('exited', 'exited with code 1; restart 1')],
      False,
      'exited with code 1',
    ),
    ([('exited', 'died of SIGKILL; restart 1')], False, 'died of SIGKILL'),
    (
      [('stopped', 'SIGTERM'), ('exited', 'died of SIGABRT')],
      False,
      'died of SIGABRT',
    ),
  ],
)
def test_a_death_that_nobody_wanted_is_found(story, over, finding):
  events = [
    ProcessEvent(float(i), 'syncer', event, 7, detail)
    for i, (event, detail) in enumerate([('started', 'start 1'), *story])
  ]
  expected = [] if finding is None else [f'syncer (7) {finding}']
  assert checks.exits(events, over) == expected


def of_two_hosts(*story):
  return [
    ProcessEvent(float(i), 'learner-0' + host, event, 7 + len(host), detail)
    for i, (host, event, detail) in enumerate(
      [('', 'started', 'start 1'), ('.1', 'started', 'start 1'), *story]
    )
  ]


def test_the_last_of_two_hosts_tells_of_the_first():
  """Issue: each kill of one host was an unwanted death of the other."""
  dead = ('.1', 'exited', 'died of SIGKILL')
  other = (
    ('', 'stopped', 'SIGKILL: learner-0.1 is dead'),
    ('', 'exited', 'learner-0.1 died of SIGKILL; restart 1'),
  )
  planned = of_two_hosts(('.1', 'killed', ''), dead, *other)
  assert checks.exits(planned, is_over=False) == []
  by_itself = checks.exits(of_two_hosts(dead, *other), is_over=False)
  assert by_itself == ['learner-0.1 (9) died of SIGKILL']


def test_an_abort_is_explained_only_where_both_hosts_leave():
  told = ('', 'stopped', 'SIGTERM'), ('.1', 'stopped', 'SIGTERM')
  gone = ('.1', 'exited', 'died of SIGTERM')
  aborts = ('', 'exited', 'died of SIGABRT; restart 1')
  for story, findings in [
    ((*told, gone, aborts), []),
    ((*told, aborts), ['learner-0 (7) died of SIGABRT']),
    ((aborts,), ['learner-0 (7) died of SIGABRT']),
  ]:
    assert checks.exits(of_two_hosts(*story), False) == findings


def test_a_pid_that_comes_again_is_another_process():
  events = [
    ProcessEvent(float(i), 'learner-0', event, 7, detail)
    for i, (event, detail) in enumerate(
      [
        ('started', 'start 1'),
        ('killed', ''),
        ('exited', 'died of SIGKILL; restart 1'),
        ('started', 'start 2'),
        ('exited', 'died of SIGKILL; restart 2'),
      ]
    )
  ]
  findings = checks.exits(events, is_over=False)
  assert findings == ['learner-0 (7) died of SIGKILL']
