# SPDX-License-Identifier: Apache-2.0
"""The supervisor with real processes: what it restarts, and what it leaves."""

import dataclasses
import os
import pathlib
import signal
import sys

import psutil
import pytest

from diloco.config import run_config
from diloco.metrics.workdir import Workdir
from diloco.syncer import storage
from experiments import tests_tiny
from launch.exit_policy import FINISHED, after_exit, describe_exit
from launch.program import Role, program
from launch.supervisor import RoleProcesses, Supervisor, rotate_log
from tests.waiting import until

pytestmark = pytest.mark.beside

DEADLINE_S = 120.0
FOREVER = 'import signal\nwhile True: signal.pause()'
DEAF = 'import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
READY = 'print("ready", flush=True)\n'


def role(name, code, ends_run=False):
  return Role(name, (sys.executable, '-c', code), ends_run)


def optional(name, code):
  return Role(name, (sys.executable, '-c', code), optional=True)


def build(tmp_path, *roles, restarts_max=3, linger_s=0.3):
  events = []
  watched = Supervisor(
    roles,
    log=lambda name: tmp_path / f'{name}.log',
    environment=os.environ,
    restarts_max=restarts_max,
    restart_delay_s=0.05,
    announce=events.append,
    linger_s=linger_s,
  )
  return watched, events


def poll_until(watched, condition):
  def holds() -> bool:
    if not condition():
      watched.poll()
    return condition()

  until(holds, DEADLINE_S, lambda: str(watched.states()))


def held(tmp_path) -> pathlib.Path:
  """Returns a pipe whose reader waits until it is written to."""
  path = tmp_path / 'over'
  os.mkfifo(path)
  return path


def told(events, kind):
  return [event.process for event in events if event.event == kind]


def test_a_killed_process_is_started_again(tmp_path):
  watched, events = build(tmp_path, role('a', FOREVER))
  with watched:
    poll_until(watched, lambda: watched.is_running('a'))
    first = watched.states()[0].pid
    watched.kill('a', 'for the test')
    poll_until(watched, lambda: watched.states()[0].starts == 2)
    assert watched.states()[0].pid != first
  kinds = [event.event for event in events]
  assert kinds == [
    'started', 'killed', 'exited', 'started', 'stopped', 'exited',
  ]  # fmt: skip
  assert events[1].detail == 'for the test'
  assert events[2].detail == 'died of SIGKILL; restart 1'


def test_a_paused_process_goes_on(tmp_path):
  watched, events = build(tmp_path, role('a', READY + FOREVER))
  log = tmp_path / 'a.log'
  with watched:
    poll_until(watched, lambda: log.exists() and 'ready' in log.read_text())
    process = psutil.Process(watched.states()[0].pid)
    watched.pause('a', 'for the test')
    poll_until(watched, lambda: process.status() == psutil.STATUS_STOPPED)
    watched.go_on('a', 'for the test')
    poll_until(watched, lambda: process.status() != psutil.STATUS_STOPPED)
    assert watched.states()[0].starts == 1
  kinds = [event.event for event in events]
  assert kinds == ['started', 'paused', 'went on', 'stopped', 'exited']
  assert events[-1].detail == 'died of SIGTERM'


def test_a_process_that_exits_with_0_is_not_started_again(tmp_path):
  watched, events = build(tmp_path, role('a', 'pass'))
  with watched:
    poll_until(watched, lambda: watched.is_over)
  assert watched.failure is None
  assert watched.states()[0].state == FINISHED
  assert told(events, 'started') == ['a']


def test_code_78_stops_the_run_at_once(tmp_path):
  watched, events = build(
    tmp_path, role('a', 'raise SystemExit(78)'), role('b', FOREVER)
  )
  with watched:
    poll_until(watched, lambda: watched.is_over)
  assert watched.failure == (
    'a exited with code 78: it can not run as configured'
  )
  assert told(events, 'started') == ['a', 'b']
  assert not psutil.pid_exists(events[1].pid)


def test_restarts_are_used_up(tmp_path):
  watched, events = build(
    tmp_path, role('a', 'raise SystemExit(3)'), restarts_max=2
  )
  with watched:
    poll_until(watched, lambda: watched.is_over)
  assert watched.failure == ('a exited with code 3; restarts used up (2 of 2)')
  assert told(events, 'started') == ['a'] * 3


def test_the_log_holds_all_starts(tmp_path):
  watched, _ = build(
    tmp_path, role('a', 'print("here"); raise SystemExit(1)'), restarts_max=1
  )
  with watched:
    poll_until(watched, lambda: watched.is_over)
  assert (tmp_path / 'a.log').read_text() == 'here\nhere\n'


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
  watched, events = build(tmp_path, role('a', DEAF + READY + FOREVER))
  log = tmp_path / 'a.log'
  poll_until(watched, lambda: log.exists() and 'ready' in log.read_text())
  watched.stop(deadline_s=0.2)
  assert not psutil.pid_exists(events[0].pid)


def test_each_role_has_as_long_to_leave_as_it_was_promised(tmp_path):
  def slow(name, takes_s, leave_s):
    code = (
      'import signal, sys, time\n'
      f'def leave(*_): time.sleep({takes_s}); print("left"); sys.exit(0)\n'
      'signal.signal(signal.SIGTERM, leave)\n'
    )
    slow_role = role(name, code + READY + FOREVER)
    return dataclasses.replace(slow_role, leave_s=leave_s)

  roles = [slow('a', 0.6, leave_s=30.0), slow('b', 20.0, leave_s=0.1)]
  watched, _ = build(tmp_path, *roles)
  logs = [tmp_path / 'a.log', tmp_path / 'b.log']
  poll_until(
    watched,
    lambda: all(x.exists() and 'ready' in x.read_text() for x in logs),
  )
  watched.stop()
  assert ['left' in x.read_text() for x in logs] == [True, False]


def test_one_that_has_left_in_time_is_not_killed_by_a_late_launcher(
  tmp_path, monkeypatch
):
  send = RoleProcesses.send

  def send_and_wait(group, number, *said):
    process = psutil.Process(group.pid)
    send(group, number, *said)
    left = lambda: process.status() == psutil.STATUS_ZOMBIE  # noqa: E731
    until(left, DEADLINE_S, 'it has left')

  watched, events = build(tmp_path, role('a', FOREVER))
  poll_until(watched, lambda: watched.is_running('a'))
  monkeypatch.setattr(RoleProcesses, 'send', send_and_wait)
  watched.stop(deadline_s=0.0)
  assert [event.event for event in events] == ['started', 'stopped', 'exited']


def test_the_roles_of_a_run_have_as_long_as_they_promise():
  config = run_config.build(tests_tiny.get_config())
  roles = program(config, [], Workdir(pathlib.Path('runs/a')), 'here:1').roles
  promised_s = {
    'syncer': 2 * storage.CLOSE_S,
    'learner-0': 25.0,
    'learner-1': 25.0,
  }
  assert {each.name for each in roles} == set(promised_s)
  for each in roles:
    assert each.leave_s > promised_s[each.name], each.name


def test_nobody_is_waited_for_in_a_hurry(tmp_path):
  watched = Supervisor(
    [dataclasses.replace(role('a', DEAF + READY + FOREVER), leave_s=1e6)],
    log=lambda name: tmp_path / f'{name}.log',
    environment=os.environ,
    restarts_max=0,
    restart_delay_s=0.05,
    announce=lambda event: None,
    hurry=lambda: True,
  )
  log = tmp_path / 'a.log'
  poll_until(watched, lambda: log.exists() and 'ready' in log.read_text())
  pid = watched.states()[0].pid
  watched.stop()
  assert not psutil.pid_exists(pid)


def test_a_log_that_has_grown_is_cut_and_kept_beside(tmp_path):
  path = tmp_path / 'a.log'
  with path.open('ab', buffering=0) as file:  # As a process has it.
    for number in range(7):
      file.write(b'%d' % number * 10)
      rotate_log(path, bytes_max=9)
    file.write(b'end')
  assert path.read_text() == 'end'
  kept = sorted(each.name for each in tmp_path.iterdir())
  assert kept == ['a.log', *(f'a.log.{n}' for n in range(1, 5))]
  assert (tmp_path / 'a.log.1').read_text() == '6' * 10
  assert (tmp_path / 'a.log.4').read_text() == '3' * 10


def test_children_of_a_dead_process_die_too(tmp_path):
  code = (
    'import os, subprocess, sys\n'
    'child = subprocess.Popen(["sleep", "1000"])\n'
    'print(child.pid, flush=True)\n'
    'os.kill(os.getpid(), 9)\n'
  )
  watched, _ = build(tmp_path, role('a', code), restarts_max=0)
  with watched:
    poll_until(watched, lambda: watched.is_over)
  grandchild = int((tmp_path / 'a.log').read_text())
  wait_gone(grandchild)


def test_an_exception_leaves_no_process(tmp_path):
  watched, events = build(tmp_path, role('a', FOREVER), role('b', FOREVER))
  with pytest.raises(ZeroDivisionError), watched:
    watched.poll()
    raise ZeroDivisionError
  assert sorted(told(events, 'exited')) == ['a', 'b']
  assert not any(psutil.pid_exists(event.pid) for event in events)


def test_a_program_that_does_not_exist_leaves_no_process(tmp_path):
  watched, events = build(
    tmp_path, role('a', FOREVER), Role('b', ('/no/such/program',))
  )
  with watched:
    poll_until(watched, lambda: watched.failure)
  assert watched.failure == (
    'b exited with code 78: it can not run as configured'
  )
  log = (tmp_path / 'b.log').read_text()
  assert log == '/no/such/program: No such file or directory\n'
  assert not psutil.pid_exists(events[0].pid)


def test_when_the_run_ends_those_who_stay_are_stopped(tmp_path):
  watched, events = build(
    tmp_path, role('end', 'pass', ends_run=True), role('a', FOREVER)
  )
  with watched:
    poll_until(watched, lambda: watched.is_over)
  assert watched.failure is None
  assert told(events, 'stopped') == ['a']


def test_when_the_run_has_ended_nobody_is_started_again(tmp_path):
  over = held(tmp_path)
  late = f'open({str(over)!r}).read(); raise SystemExit(1)'
  watched, events = build(
    tmp_path,
    role('end', 'pass', ends_run=True),
    role('a', late),
    linger_s=DEADLINE_S,
  )
  with watched:
    poll_until(watched, lambda: told(events, 'exited') == ['end'])
    over.write_text('')
    poll_until(watched, lambda: watched.is_over)
  assert watched.failure is None
  assert events[-1].detail == 'exited with code 1; the run is over, no restart'


def test_a_run_that_all_others_have_left_does_not_go_on(tmp_path):
  watched, _ = build(
    tmp_path, role('end', FOREVER, ends_run=True), role('a', 'pass')
  )
  with watched:
    poll_until(watched, lambda: watched.is_over)
  assert watched.failure == 'end goes on though all others have finished'


@pytest.mark.parametrize(
  ('code', 'restarts', 'over', 'state', 'stops', 'reason'),
  [
    (0, 0, False, 'finished', False, 'exited with code 0'),
    (1, 0, False, 'waiting', False, 'exited with code 1; restart 1'),
    (-9, 1, False, 'waiting', False, 'died of SIGKILL; restart 2'),
    (-9, 2, False, 'dead', True, 'died of SIGKILL; restarts used up (2 of 2)'),
    (78, 0, False, 'dead', True, 'exited with code 78: it can not run as'),
    (78, 0, True, 'dead', False, 'the run is over, no restart'),
    (69, 0, False, 'dead', False, 'its steps are made, no syncer'),
  ],
)
def test_what_becomes_of_a_process(code, restarts, over, state, stops, reason):
  decision = after_exit(code, restarts, 2, over)
  assert (decision.state, decision.stops_run) == (state, stops)
  assert reason in decision.reason


def test_signals_have_names():
  assert describe_exit(-signal.SIGSEGV) == 'died of SIGSEGV'


def wait_gone(pid):
  until(lambda: is_gone(pid), DEADLINE_S, f'{pid} is gone')


def is_gone(pid) -> bool:
  """A zombie is: the process that adopted it has only to reap it."""
  try:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return True


def test_without_an_optional_process_the_run_goes_on(tmp_path):
  """The optional process can't run as configured; the other finishes."""
  over = held(tmp_path)
  needed = role('a', f'open({str(over)!r}).read()')
  watched, events = build(tmp_path, needed, optional('b', 'exit(78)'))
  with watched:
    poll_until(watched, lambda: told(events, 'exited') == ['b'])
    over.write_text('')
    poll_until(watched, lambda: watched.is_over)
    assert watched.failure is None
    assert [each.state for each in watched.states()] == ['finished', 'dead']


def test_an_optional_process_does_not_keep_a_run_alive(tmp_path):
  """The learners have finished, the syncer has not: that is found out."""
  roles = role('syncer', FOREVER, True), role('a', ''), optional('b', FOREVER)
  watched, _ = build(tmp_path, *roles)
  with watched:
    poll_until(watched, lambda: watched.is_over)
    assert watched.failure == ('syncer goes on though all others have finished')


def test_a_role_that_is_added_is_started(tmp_path):
  watched, _ = build(tmp_path, role('a', FOREVER))
  with watched:
    poll_until(watched, lambda: watched.is_running('a'))
    watched.add(role('b', FOREVER))
    poll_until(watched, lambda: watched.is_running('b'))


def test_who_is_told_to_leave_comes_back_and_who_is_dismissed_does_not(
  tmp_path,
):
  watched, events = build(tmp_path, role('a', FOREVER), role('b', FOREVER))
  with watched:
    poll_until(watched, lambda: all(s.pid for s in watched.states()))
    watched.terminate('a', 'for the test')
    watched.dismiss('b', 'for the test')
    poll_until(watched, lambda: watched.states()[0].starts == 2)
    poll_until(watched, lambda: 'b' in told(events, 'exited'))
    assert not watched.is_running('b')
    assert not watched.is_over
    [left] = [e for e in events if (e.process, e.event) == ('b', 'exited')]
    assert left.detail == 'died of SIGTERM; it was dismissed'
    poll_until(watched, lambda: watched.is_running('a'))
    assert watched.states()[1].starts == 1


def test_a_role_that_is_dead_can_be_added_again(tmp_path):
  watched, events = build(tmp_path, role('a', FOREVER), role('b', FOREVER))
  with watched:
    watched.dismiss('b', 'before it began')
    poll_until(watched, lambda: watched.is_running('a'))
    assert not watched.is_running('b')
    watched.add(role('b', FOREVER))
    poll_until(watched, lambda: watched.is_running('b'))
    watched.dismiss('b', 'for the test')
    poll_until(watched, lambda: 'b' in told(events, 'exited'))
    watched.add(role('b', FOREVER))
    poll_until(watched, lambda: watched.is_running('b'))
    watched.kill('b', 'for the test')  # As any other, it is restarted.
    poll_until(watched, lambda: watched.states()[1].starts == 2)
