# SPDX-License-Identifier: Apache-2.0
"""The verdict of a run by hand: what is planted is found, and nothing else."""

import dataclasses
import json
import types

import pytest

from diloco.faults import Fault
from diloco.metrics import names
from diloco.metrics.token_ledger import TokenCounts
from diloco.metrics.workdir import EVALUATOR, Workdir
from diloco.watch import run_page
from launch.chaos import baselines, verdict
from launch.chaos.baselines import Losses
from launch.chaos.conductor import Course, Folder
from launch.chaos.live_run import WrittenStep
from launch.chaos.record import Effects, Figures, Record
from launch.chaos.record import figures as figures_of
from launch.chaos.verdict import Evidence
from launch.supervisor import ProcessEvent

pytestmark = pytest.mark.alone

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
    found.append(WrittenStep(T0 + at_s, 1, count, 0.5, 0.05))
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
    'performed': tuple(lines or (performed(CUT), performed(KILL))),
    'course': Course(T0 - 8.0, T0, T0 + 30.0),
    'tape': tape(),
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
  }
  return Record(**{**fields, **changes})


def figures(goodput=0.9):
  return Figures(goodput, 1.0, 40, 100, 0.0, {}, {})


def failing(found: Record, **changes) -> dict[str, tuple[str, ...]]:
  """The checks that do not hold, by name."""
  own = figures_of(found, 0.0).goodput
  given = Evidence(found, **{'simulation': figures(own), **changes})
  return {x.name: tuple(x.findings) for x in verdict.check(given) if x.findings}


def test_a_good_run_has_no_findings():
  assert failing(made()) == {}


def test_what_each_fault_did():
  cut, kill = Effects(made()).outcomes()
  assert (cut.counted, cut.begun_s) == (100, 5.0)
  assert cut.back_s == pytest.approx(5.25)  # Merged again at 10.25.
  assert cut.lost_s == pytest.approx(0.0)  # It trained on.
  assert kill.counted is None
  assert kill.back_s == pytest.approx(9.25)
  assert kill.lost_s == pytest.approx(8.0, abs=0.5)
  assert kill.stall_s == pytest.approx(0.0)


def test_a_stall_of_a_survivor_is_found_and_one_of_the_dead_is_not():
  found = made()
  assert Effects(found).longest_stall_s() == pytest.approx(0.0)
  slow = [s for s in found.steps[1] if not T0 + 13.0 < s.time_s < T0 + 16.0]
  late = made(steps={**found.steps, 1: slow})
  assert Effects(late).longest_stall_s() == pytest.approx(2.5)
  _, kill = Effects(late).outcomes()
  assert kill.stall_s == pytest.approx(2.5)


def test_participation_and_refusals():
  refused = [
    {'kind': 'refused', 'reason': f'norm {n} is large', names.TIME: T0 + n}
    for n in (1.5, 2.5)
  ]
  found = figures_of(made(tape=sorted_tape([*tape(), *refused])), 0.0)
  assert found.refused == {'norm … is large': 2}
  assert found.participation[0] == pytest.approx(32 / 40)
  assert found.participation[1] == pytest.approx(35 / 40)


def sorted_tape(lines):
  return sorted(lines, key=lambda line: line[names.TIME])


def test_an_unbalanced_ledger_fails():
  rows = {(1, 0): TokenCounts(100, 60, 32, (), 0)}
  assert failing(made(ledger=rows)) == {
    'every token is accounted for': (
      'learner 1, fragment 0: +8 of 100 tokens unexplained; ' + str(rows[1, 0]),
    )
  }


def test_tokens_that_were_never_trained_fail():
  few = {0: steps_of(0)[:3], 1: steps_of(1)}
  assert 'no more merged than trained' in failing(made(steps=few))


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
  own = figures_of(made(), 0.0).goodput
  found = failing(made(), simulation=figures(own + points / 100))
  assert ('goodput is as simulated' not in found) == holds


@pytest.mark.parametrize(
  ('own', 'holds'), [(2.0, True), (2.09, True), (2.2, False), (1.0, True)]
)
def test_loss_is_compared_with_the_twins(own, holds):
  late = Losses(2000, 1.8, (1.8, 1.81))
  for losses in [
    (Losses(1000, own, (2.0, 2.01)), late),
    (late, Losses(4000, own, (2.0, 2.01))),
  ]:
    found = failing(made(), losses=losses)
    assert ('loss is as without faults' not in found) == holds


def test_losses_are_compared_after_as_many_tokens(tmp_path):
  def evaluated(root, lines):
    path = Workdir(root).metrics(EVALUATOR)
    path.parent.mkdir(parents=True)
    path.write_text(
      ''.join(
        json.dumps({names.MERGED_TOKENS: at, names.EVAL_LOSS: loss}) + '\n'
        for at, loss in lines
      )
    )

  folder = Folder(Workdir(tmp_path))
  # Their losses are 8 / tokens; the run is evaluated often, the twin seldom.
  evaluated(tmp_path, [(at, 8 / at) for at in range(10, 1601, 10)])
  evaluated(folder.twin(0), [(at, 8 / at) for at in range(100, 2001, 100)])
  found = baselines.losses(folder)
  assert [each.tokens for each in found] == [200, 400, 800, 1600]
  assert found[1].run == pytest.approx(8 / 380, rel=0.002)  # 360 … 400.
  assert found[1].twins == pytest.approx((8 / 400,))
  assert found[3].twins == pytest.approx((8 / 1550,), rel=0.002)


def test_a_learner_that_waits_for_the_dead_fails_unless_all_are_late():
  found = made()
  waits = [s for s in found.steps[1] if not T0 + 13.0 < s.time_s < T0 + 17.0]
  waited = made(steps={**found.steps, 1: waits})
  [(name, findings)] = failing(waited).items()
  assert name == 'the others step on'
  assert findings == (
    'fault 2, kill learner-0: another learner stood for 3.50 s, at most 3.00',
  )
  for at_s, holds in [(16.0, True), (26.0, False)]:
    late = dataclasses.replace(waited.course, late_turns=((T0 + at_s, 0.3),))
    assert (not failing(dataclasses.replace(waited, course=late))) == holds


def test_the_page_of_a_run_reads_the_outcomes(tmp_path):
  """Issue: a field too many, and no fault was on the page."""
  workdir = Workdir(tmp_path)
  folder = Folder(workdir)
  folder.root.mkdir(parents=True)
  outcomes = list(map(dataclasses.asdict, Effects(made()).outcomes()))
  folder.course.write_text(json.dumps(dataclasses.asdict(made().course)))
  for extra in ({}, {'in_use': True}):  # As 0.1.0 wrote it.
    told = {'outcomes': [{**each, **extra} for each in outcomes]}
    folder.verdict.write_text(json.dumps(told))
    cut, kill = run_page.fault_rows(workdir, T0 - 10.0)
    assert (cut[1], cut[3], kill[4]) == ('cut', 15.0, 9.25)
