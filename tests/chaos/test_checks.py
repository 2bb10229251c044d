# SPDX-License-Identifier: Apache-2.0
"""The checks find what is planted in a run by hand, and nothing else."""

import dataclasses
import json
import types

import pytest

from diloco.faults import Fault
from diloco.metrics import names
from diloco.metrics.token_ledger import TokenCounts
from diloco.metrics.workdir import Workdir
from diloco.watch import run_page
from launch.chaos import checks
from launch.chaos.checks import Record
from launch.chaos.stage import COURSE, RunPhases, WrittenStep
from launch.supervisor import ProcessEvent
from tests.prediction import recorded

pytestmark = pytest.mark.beside

T0 = 1000.0  # The plan begins; the first learner was ready 10 s before.
TOKENS = 8
CUT = Fault(1, 5.0, 'cut', 'learner-1', 4.0)
KILL = Fault(2, 12.0, 'kill', 'learner-0')
SILENT = {0: (12.0, 20.0), 1: ()}  # Learner 0 makes no step then.
EVENTS = (
  ('learner-0', 'started', 70, -12.0),
  ('learner-1', 'started', 71, -12.0),
  ('learner-0', 'killed', 70, 12.0),
  ('learner-0', 'exited', 70, 12.1),
  ('learner-0', 'started', 72, 12.5),
)


def performed(fault, **changes):
  counted = {
    way: {'held_bytes': 50, 'held_connects': 0} for way in ('up', 'down')
  }
  return {
    **dataclasses.asdict(fault),
    'began_s': T0 + fault.at_s,
    'ended_s': T0 + fault.end_s,
    'counted': counted if fault.kind == 'cut' else {},
    'failed': '',
    **changes,
  }


def steps_of(learner):
  """A step every half second; learner 0 has two processes."""
  found, count = [], 0
  for i in range(-20, 61):
    at_s = i / 2
    if learner == 0 and 12.0 < at_s < 20.0:
      count = 0
      continue
    count += 1
    found.append(WrittenStep(T0 + at_s, 1, count, 0.5))
  return found


def tape():
  lines = [
    {'kind': 'joined', 'learner': 0, names.TIME: T0 - 11.0},
    {'kind': 'ready', names.TIME: T0 - 10.0},
  ]
  for version, i in enumerate(range(-10, 31), start=1):
    here = [m for m in (0, 1) if not (m == 0 and 12 < i < 21)]
    here = [m for m in here if not (m == 1 and 5 <= i < 10)]
    lines.append(
      {
        'kind': 'Publish',
        names.TIME: T0 + i + 0.25,
        'round': version,
        'fragment': 0,
        'version': version,
        'crc': version,
        'sync_s': 0.01,
        'shares': [
          {
            'learner': m,
            'incarnation': 1,
            'base_version': version - 1,
            'c_steps': 1,
            'c_tokens': TOKENS,
            'step': version,
          }
          for m in here
        ],
      }
    )
  return lines


def made(lines=None, **changes) -> Record:
  protocol = types.SimpleNamespace(learners=2)
  run = types.SimpleNamespace(restart_delay_s=0.5)
  data = types.SimpleNamespace(batch=1, seq_len=TOKENS)
  fields = {
    'config': types.SimpleNamespace(protocol=protocol, run=run, data=data),
    'plan': (CUT, KILL),
    'performed': {
      line['number']: line
      for line in lines or (performed(CUT), performed(KILL))
    },
    'course': RunPhases(T0 - 8.0, T0, T0 + 30.0),
    'tape': tape(),
    'tapes': {1: [applied(1, 1), applied(2, 2)]},
    'steps': {0: steps_of(0), 1: steps_of(1)},
    'events': tuple(
      ProcessEvent(
        T0 + at_s,
        name,
        event,
        pid,
        'died of SIGKILL; restart 1' if event == 'exited' else '',
      )
      for name, event, pid, at_s in EVENTS
    ),
    'ledger': {(0, 0): TokenCounts(100, 60, 40, (), 0)},
    'simulated_goodput': 0.0,
  }
  found = Record(**{**fields, **changes})
  if 'simulated_goodput' in changes:
    return found
  return dataclasses.replace(found, simulated_goodput=found.goodput)


def applied(version, crc):
  return {'kind': 'Apply', 'fragment': 0, 'version': version, 'crc': crc}


def failing(found: Record) -> dict[str, tuple[str, ...]]:
  """The checks that do not hold, by name."""
  return {x.name: tuple(x.findings) for x in checks.checks(found) if x.findings}


def test_a_good_run_has_no_findings():
  assert failing(made()) == {}


def test_what_each_fault_did():
  cut, kill = made().outcomes
  assert (cut.counted, cut.begun_s) == (100, 5.0)
  assert cut.back_s == pytest.approx(5.25)  # Merged again at 10.25.
  assert cut.lost_s == pytest.approx(0.0)  # It trained on.
  assert kill.counted is None
  assert kill.back_s == pytest.approx(9.25)
  assert kill.lost_s == pytest.approx(8.0, abs=0.5)
  assert kill.stall_s == pytest.approx(0.0)


def test_other_bits_of_a_version_fail():
  tapes = {0: [applied(1, 1)], 1: [applied(2, 7), applied(99, 5)]}
  assert failing(made(tapes=tapes)) == {
    'the bits agree': (
      'learner 1, fragment 0, version 2: CRC 7, the syncer has 2',
    )
  }


def test_a_version_that_nobody_had_any_more_goes_on_with_older_bits():
  started = {'kind': 'Started', 'versions': [2], 'crcs': [1]}
  tapes = {0: [applied(2, 1)], 1: [applied(2, 2)]}
  lines = [{'time_s': T0 + 1.0, **started}, *tape()]
  assert 'the bits agree' not in failing(made(tape=lines, tapes=tapes))


def test_an_unbalanced_ledger_fails():
  rows = {(1, 0): TokenCounts(100, 60, 32, (), 0)}
  assert failing(made(ledger=rows)) == {
    'every token is accounted for': (
      'learner 1, fragment 0: +8 of 100 tokens unexplained; ' + str(rows[1, 0]),
    )
  }


def test_a_link_fault_that_did_nothing_fails():
  nothing = {w: {'held_bytes': 0, 'held_connects': 0} for w in ('up', 'down')}
  lines = performed(CUT, counted=nothing), performed(KILL)
  assert failing(made(lines)) == {
    'link faults moved their counters': (
      'fault 1, cut learner-1: it changed nothing, held_bytes and '
      'held_connects stayed 0',
    )
  }


def test_a_link_whose_end_was_starting_need_not_carry_anything():
  nothing = {w: {'held_bytes': 0, 'held_connects': 0} for w in ('up', 'down')}
  lines = performed(CUT, counted=nothing), performed(KILL)
  for name in ('learner-1', 'syncer'):
    started = ProcessEvent(T0 + 4.5, name, 'started', 77, 'start 2')
    assert failing(made(lines, events=(*made().events, started))) == {}


def test_of_a_one_way_cut_only_that_way_counts():
  fault = dataclasses.replace(CUT, kind='cut_one_way', way='up')
  counted = {
    'up': {'held_bytes': 0, 'held_connects': 0},
    'down': {'held_bytes': 7, 'held_connects': 0},
  }
  lines = performed(fault, counted=counted), performed(KILL)
  found = made(lines, plan=(fault, KILL))
  assert 'link faults moved their counters' in failing(found)


def test_a_fault_that_was_not_performed_fails():
  found = failing(made((performed(CUT), performed(KILL, failed='too late'))))
  assert found['the plan was performed'] == (
    'fault 2, kill learner-0: too late',
  )
  missing = failing(made((performed(CUT),)))
  assert 'the plan was performed' in missing


def test_a_run_that_is_not_whole_at_its_end_fails():
  course = dataclasses.replace(made().course, unready='not within 240 s')
  assert list(failing(made(course=course))) == ['all are back at the end']


def test_a_version_that_falls_and_an_unwanted_death_fail():
  lines = tape()
  lines[-1] = {**lines[-1], 'version': 3}
  died = ProcessEvent(T0 + 25.0, 'learner-1', 'exited', 71, 'died of SIGSEGV')
  found = made(tape=lines, events=(*made().events, died))
  assert failing(found).keys() == {
    'no process dies by itself',
    'versions rise by one',
  }


@pytest.mark.parametrize(('points', 'holds'), [(-4.0, True), (-6.0, False)])
def test_goodput_is_within_five_points_of_the_simulated(points, holds):
  simulated = made().goodput + points / 100
  found = failing(made(simulated_goodput=simulated))
  assert ('goodput is as simulated' not in found) == holds


def test_a_learner_that_waits_for_the_dead_fails_unless_all_are_late():
  found = made()
  waits = [s for s in found.steps[1] if not T0 + 13.0 < s.time_s < T0 + 17.0]
  waited = made(steps={**found.steps, 1: waits})
  [(name, findings)] = failing(waited).items()
  assert name == 'the others step on'
  assert findings == (
    'fault 2, kill learner-0: another learner stood for 3.50 s, at most 3.00',
  )
  slow = [s for s in found.steps[1] if not T0 + 13.0 < s.time_s < T0 + 16.0]
  assert failing(made(steps={**found.steps, 1: slow})) == {}
  for at_s, holds in [(16.0, True), (26.0, False)]:
    late = dataclasses.replace(waited.course, late_turns=((T0 + at_s, 0.3),))
    assert (not failing(dataclasses.replace(waited, course=late))) == holds


def test_a_learner_that_lost_a_slice_is_back_once_it_is_whole():
  """It goes on with the other at once, and stands when the slice returns."""
  fault = Fault(1, 12.0, 'kill_slice', 'learner-0.1')
  events = (
    ('learner-0', 'started', 70, -12.0),
    ('learner-0.1', 'started', 71, -12.0),
    ('learner-0.1', 'killed', 71, 12.0),
    ('learner-0', 'started', 72, 12.5),
    ('learner-0', 'started', 73, 22.5),
    ('learner-0.1', 'started', 74, 22.5),
  )
  found = made(
    [performed(fault)],
    plan=(fault,),
    events=tuple(
      ProcessEvent(T0 + at_s, name, event, pid, '')
      for name, event, pid, at_s in events
    ),
  )
  [outcome] = found.outcomes
  assert outcome.back_s == 23.25 - 12.0


def test_the_page_of_a_run_reads_the_outcomes(tmp_path):
  """Issue: a field too many, and no fault was on the page."""
  workdir = Workdir(tmp_path)
  workdir.chaos.mkdir(parents=True)
  outcomes = list(map(dataclasses.asdict, made().outcomes))
  course = json.dumps(dataclasses.asdict(made().course))
  (workdir.chaos / COURSE).write_text(course)
  for extra in ({}, {'in_use': True}):  # As 0.1.0 wrote it.
    told = {'outcomes': [{**each, **extra} for each in outcomes]}
    (workdir.chaos / checks.VERDICT).write_text(json.dumps(told))
    cut, kill = run_page.fault_rows(workdir, T0 - 10.0)
    assert (cut[1], cut[3], kill[4]) == ('cut', 15.0, 9.25)


# Single checks, of event logs and of a launcher's events.


@pytest.mark.parametrize(('version', 'after'), [(1, 2), (2, 2), (4, 2)])
def test_a_version_that_falls_stays_or_jumps_is_found(version, after):
  closes = [
    {'kind': 'Publish', 'round': round_, 'fragment': p, 'version': each}
    for round_, p, each in ((1, 0, 1), (2, 1, 1), (3, 0, 2), (5, 0, version))
  ]
  assert checks.versions([{'kind': 'ready', 'learner': 0}, *closes[:3]]) == []
  (finding,) = checks.versions(closes)
  assert finding == f'fragment 0: version {version} after {after}, in round 5'


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
  planned_death = ('.1', 'killed', ''), dead
  other = (
    ('', 'stopped', 'SIGKILL: learner-0.1 is dead'),
    ('', 'exited', 'learner-0.1 died of SIGKILL; restart 1'),
  )
  planned = of_two_hosts(*planned_death, *other)
  assert checks.exits(planned, is_over=False) == []
  by_itself = checks.exits(of_two_hosts(dead, *other), is_over=False)
  assert by_itself == ['learner-0.1 (9) died of SIGKILL']
  # A slice that ends by itself, as the other is gone, is not told to.
  assert checks.exits(of_two_hosts(*planned_death, other[1]), False) == []


def test_slices_that_go_on_are_no_deaths_and_those_that_start_again_are():
  lost = (('.1', 'killed', ''), ('.1', 'exited', 'died of SIGKILL'))
  goes_on = ('', 'exited', 'exited with code 75; goes on with slices 0')
  assert checks.exits(of_two_hosts(*lost, goes_on), False) == []
  again = ('', 'exited', 'exited with code 75; restart 1')
  assert checks.exits(of_two_hosts(*lost, again), False) == [
    'learner-0 (7) exited with code 75'
  ]


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


def test_times_of_a_plan_are_counted_from_the_first_ready_learner(
  tmp_path, monkeypatch
):
  workdir = recorded.write(tmp_path / 'run', 80.0, {})
  course = RunPhases(*(recorded.BEGAN_S + at_s for at_s in (8.0, 40.0, 70.0)))
  asked = []
  monkeypatch.setattr(
    checks.twin,
    'simulate',
    lambda *given: asked.append(given) or types.SimpleNamespace(goodput=0.5),
  )
  checks.simulate(workdir, recorded.config(), (), course, 0)
  assert asked[0][4] == pytest.approx((40.0, 70.0))
