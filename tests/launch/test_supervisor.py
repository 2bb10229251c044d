# SPDX-License-Identifier: Apache-2.0
"""The supervisor with real processes: what it restarts, and what it leaves."""

import dataclasses
import os
import pathlib
import re
import signal
import sys

import psutil
import pytest

from diloco.config import run_config
from diloco.config.hardware import GROUP_SECRET
from diloco.metrics.workdir import Workdir
from diloco.syncer import storage
from experiments import tests_tiny
from launch.program import Role, program
from launch.supervisor import RoleProcesses, Supervisor, after_exit, rotate_log
from tests.waiting import until

pytestmark = pytest.mark.beside

DEADLINE_S = 120.0
SHORT_S = 0.3  # That others may go on, where a test waits for the end of it.
# `signal.pause` would not wake for a signal that came just before it.
FOREVER = 'import time\nwhile True: time.sleep(0.1)'
DEAF = 'import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
READY = 'print("ready", flush=True)\n'
# One host of a learner: reports its name, then leaves with the code that it is
# given, '-' for none, or stays until a signal; 'deaf' also after SIGTERM.
MEMBER = """
import signal, sys, time
what, *flags = sys.argv[1:]
given = dict(flag.lstrip('-').split('=') for flag in flags)
def leave(number, frame): sys.exit(143)
signal.signal(signal.SIGTERM, signal.SIG_IGN if what == 'deaf' else leave)
print(f'{given["host"]} of {given["hosts"]} at {given["coordinator"]}')
sys.stdout.flush()
codes = {str(i): code for i, code in enumerate(what.split(','))}
code = codes.get(given['host'], '-')
if code.isdecimal():
  sys.exit(int(code))
while True:
  time.sleep(0.1)
"""


def role(name, code, **more):
  return Role(name, (sys.executable, '-c', code), **more)


def learner(name='learner-0', what='stay', hosts=2):
  argv = (sys.executable, '-I', '-S', '-c', MEMBER, what)
  return Role(name, argv, hosts=hosts)


class Run:
  """Roles under a supervisor, and what was told of their processes."""

  def __init__(self, folder, *roles, restarts_max=3, linger_s=60.0, **more):
    self.folder = folder
    self.events = []
    self.supervisor = Supervisor(
      roles,
      log=self.log,
      environment=os.environ,
      restarts_max=restarts_max,
      restart_delay_s=0.05,
      announce=self.events.append,
      linger_s=linger_s,
      **more,
    )

  def __enter__(self):
    self.supervisor.__enter__()
    return self

  def __exit__(self, *exception):
    self.supervisor.__exit__(*exception)
    assert not any(psutil.pid_exists(event.pid) for event in self.events)

  @property
  def failure(self):
    return self.supervisor.failure

  def log(self, name):
    return self.folder / f'{name}.log'

  def until(self, condition):
    def holds() -> bool:
      if not condition():
        self.supervisor.poll()
      return condition()

    until(holds, DEADLINE_S, lambda: str(self.events))

  def until_over(self):
    self.until(lambda: self.supervisor.is_over)

  def until_ready(self, *names, starts=1):
    """Waits until each has written one line, in its newest start."""
    self.until(lambda: all(len(self.said(n)) == starts for n in names))

  def said(self, name):
    """Returns its whole lines; the end of one may be a write of its own."""
    path = self.log(name)
    return path.read_text().split('\n')[:-1] if path.exists() else []

  def state(self, name):
    (found,) = [x for x in self.supervisor.states() if x.name == name]
    return found

  def pid(self, name):
    started = (e for e in self.events if e.event == 'started')
    return [e.pid for e in started if e.process == name][-1]

  def told(self, name):
    return [f'{e.event}: {e.detail}' for e in self.events if e.process == name]

  def those(self, kind):
    return [event.process for event in self.events if event.event == kind]


def held(tmp_path) -> pathlib.Path:
  """Returns a pipe whose reader waits until it is written to."""
  path = tmp_path / 'over'
  os.mkfifo(path)
  return path


def test_a_killed_process_is_started_again(tmp_path):
  with Run(tmp_path, role('a', FOREVER)) as run:
    run.until(lambda: run.supervisor.is_running('a'))
    first = run.state('a').pid
    run.supervisor.kill('a', 'for the test')
    run.until(lambda: run.state('a').starts == 2)
    assert run.state('a').pid != first
  assert run.told('a') == [
    'started: start 1', 'killed: for the test',
    'exited: died of SIGKILL; restart 1', 'started: start 2',
    'stopped: SIGTERM', 'exited: died of SIGTERM',
  ]  # fmt: skip


def test_a_paused_process_goes_on(tmp_path):
  with Run(tmp_path, role('a', READY + FOREVER)) as run:
    run.until_ready('a')
    process = psutil.Process(run.state('a').pid)
    run.supervisor.send('a', signal.SIGSTOP, 'paused', 'for the test')
    run.until(lambda: process.status() == psutil.STATUS_STOPPED)
    run.supervisor.send('a', signal.SIGCONT, 'went on', 'for the test')
    run.until(lambda: process.status() != psutil.STATUS_STOPPED)
    assert run.state('a').starts == 1


@pytest.mark.parametrize(
  ('code', 'starts', 'failure'),
  [
    ('0', 1, None),
    ('78', 1, 'a exited with code 78: it can not run as configured'),
    ('3', 3, 'a exited with code 3; restarts used up (2 of 2)'),
  ],
)
def test_what_an_exit_does_to_the_run(tmp_path, code, starts, failure):
  """The log holds all starts; a failure ends the others, too."""
  first = role('a', f'{READY}raise SystemExit({code})')
  others = [role('b', FOREVER)] if failure else []
  with Run(tmp_path, first, *others, restarts_max=2) as run:
    run.until_over()
  assert run.failure == failure
  assert (
    run.said('a') == ['ready'] * starts == ['ready'] * run.state('a').starts
  )
  assert run.state('a').state == ('dead' if failure else 'finished')


def test_a_program_that_does_not_exist_leaves_no_process(tmp_path):
  with Run(tmp_path, role('a', FOREVER), Role('b', ('/no/program',))) as run:
    run.until(lambda: run.failure)
  assert run.failure == 'b exited with code 78: it can not run as configured'
  assert run.said('b') == ['/no/program: No such file or directory']


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
  with Run(tmp_path, role('a', DEAF + READY + FOREVER)) as run:
    run.until_ready('a')
    run.supervisor.stop(deadline_s=0.2)


def test_nobody_is_waited_for_in_a_hurry(tmp_path):
  deaf = role('a', DEAF + READY + FOREVER, leave_s=1e6)
  with Run(tmp_path, deaf, hurry=lambda: True) as run:
    run.until_ready('a')


def test_each_role_has_as_long_to_leave_as_it_was_promised(tmp_path):
  def slow(name, takes_s, leave_s):
    code = (
      'import signal, sys, time\n'
      f'def leave(*_): time.sleep({takes_s}); print("left"); sys.exit(0)\n'
      'signal.signal(signal.SIGTERM, leave)\n'
    )
    return role(name, code + READY + FOREVER, leave_s=leave_s)

  with Run(tmp_path, slow('a', 0.6, 30.0), slow('b', 20.0, 0.1)) as run:
    run.until_ready('a', 'b')
  assert [run.said('a')[1:], run.said('b')[1:]] == [['left'], []]


def test_one_that_has_left_in_time_is_not_killed_by_a_late_launcher(
  tmp_path, monkeypatch
):
  send = RoleProcesses.send

  def send_and_wait(group, number, *said):
    process = psutil.Process(group.pid)
    send(group, number, *said)
    left = lambda: process.status() == psutil.STATUS_ZOMBIE  # noqa: E731
    until(left, DEADLINE_S, 'it has left')

  with Run(tmp_path, role('a', FOREVER)) as run:
    run.until(lambda: run.supervisor.is_running('a'))
    with monkeypatch.context() as patched:
      patched.setattr(RoleProcesses, 'send', send_and_wait)
      run.supervisor.stop(deadline_s=0.0)
  assert [e.event for e in run.events] == ['started', 'stopped', 'exited']


def test_the_roles_of_a_run_have_as_long_as_they_promise():
  config = run_config.build(tests_tiny.get_config())
  roles = program(config, [], Workdir(pathlib.Path('runs/a')), 'here:1').roles
  promised_s = {'syncer': 2 * storage.CLOSE_S, 'learner-0': 25, 'learner-1': 25}
  assert {each.name for each in roles} == set(promised_s)
  assert all(each.leave_s > promised_s[each.name] for each in roles)


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
  with Run(tmp_path, role('a', code), restarts_max=0) as run:
    run.until_over()
  grandchild = int(run.said('a')[0])
  until(lambda: is_gone(grandchild), DEADLINE_S, f'{grandchild} is gone')


def is_gone(pid) -> bool:
  """A zombie is: the process that adopted it has only to reap it."""
  try:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return True


def test_an_exception_leaves_no_process(tmp_path):
  run = Run(tmp_path, role('a', FOREVER), role('b', FOREVER))
  with pytest.raises(ZeroDivisionError), run:
    run.supervisor.poll()
    raise ZeroDivisionError
  assert sorted(run.those('exited')) == ['a', 'b']


def test_when_the_run_ends_those_who_stay_are_stopped(tmp_path):
  end = role('end', 'pass', ends_run=True)
  with Run(tmp_path, end, role('a', FOREVER), linger_s=SHORT_S) as run:
    run.until_over()
  assert run.failure is None
  assert run.those('stopped') == ['a']


def test_when_the_run_has_ended_nobody_is_started_again(tmp_path):
  over = held(tmp_path)
  late = f'open({str(over)!r}).read(); raise SystemExit(1)'
  end = role('end', 'pass', ends_run=True)
  with Run(tmp_path, end, role('a', late), linger_s=DEADLINE_S) as run:
    run.until(lambda: run.those('exited') == ['end'])
    over.write_text('')
    run.until_over()
  assert run.failure is None
  assert run.events[-1].detail.endswith('1; the run is over, no restart')


def test_a_run_that_all_others_have_left_does_not_go_on(tmp_path):
  """An optional process does not keep it alive either."""
  end, other = role('end', FOREVER, ends_run=True), role('a', 'pass')
  more = role('b', FOREVER, optional=True)
  with Run(tmp_path, end, other, more, linger_s=SHORT_S) as run:
    run.until_over()
  assert run.failure == 'end goes on though all others have finished'


def test_without_an_optional_process_the_run_goes_on(tmp_path):
  """The optional process can't run as configured; the other finishes."""
  over = held(tmp_path)
  needed = role('a', f'open({str(over)!r}).read()')
  with Run(tmp_path, needed, role('b', 'exit(78)', optional=True)) as run:
    run.until(lambda: run.those('exited') == ['b'])
    over.write_text('')
    run.until_over()
    assert run.failure is None
    assert [run.state(x).state for x in 'ab'] == ['finished', 'dead']


@pytest.mark.parametrize(
  ('code', 'restarts', 'over', 'state', 'stops', 'reason'),
  [
    (0, 0, False, 'finished', False, 'exited with code 0'),
    (1, 0, False, 'waiting', False, 'exited with code 1; restart 1'),
    (-11, 1, False, 'waiting', False, 'died of SIGSEGV; restart 2'),
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


def test_roles_come_and_go(tmp_path):
  """One that is told to leave comes back; one that is dismissed does not."""
  with Run(tmp_path, role('a', FOREVER), role('b', FOREVER)) as run:
    watched = run.supervisor
    watched.dismiss('b', 'before it began')
    run.until(lambda: watched.is_running('a'))
    assert not watched.is_running('b')
    watched.add(role('b', FOREVER))
    run.until(lambda: watched.is_running('b'))
    watched.terminate('a', 'for the test')
    watched.dismiss('b', 'for the test')
    run.until(lambda: run.state('a').starts == 2)
    run.until(lambda: 'b' in run.those('exited'))
    assert not watched.is_running('b') and not watched.is_over
    assert run.told('b')[-1] == 'exited: died of SIGTERM; it was dismissed'
    watched.add(role('b', FOREVER))
    run.until(lambda: watched.is_running('b'))
    watched.kill('b', 'for the test')  # As any other, it is restarted.
    run.until(lambda: run.state('b').starts == 2)


# Learners of several processes: one dies, all die.


@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_member_takes_the_others_with_it(tmp_path, victim):
  """Its hosts meet elsewhere; the learner beside them notices nothing."""
  names, others = ['learner-0', 'learner-0.1'], ['', '.1', '.2']
  others = [f'learner-1{i}' for i in others]
  with Run(tmp_path, learner(), learner('learner-1', hosts=3)) as run:
    run.until_ready(*names, *others)
    survivor = run.pid(names[1 - victim])
    os.kill(run.pid(names[victim]), signal.SIGKILL)
    run.until_ready(*names, starts=2)
    assert not psutil.pid_exists(survivor)
    assert run.told(names[1 - victim])[1:3] == [
      f'stopped: SIGKILL: {names[victim]} is dead',
      f'exited: {names[victim]} died of SIGKILL; restart 1',
    ]
    met = [
      [re.fullmatch(rf'{i} of 2 at (.*)', line)[1] for line in run.said(name)]
      for i, name in enumerate(names)
    ]
    assert met[0] == met[1]
    assert len(set(met[0])) == 2
    assert [len(run.said(each)) for each in others] == [1] * 3


def test_a_role_of_one_process_is_told_nothing(tmp_path):
  code = 'import sys; print(sys.argv[1:], flush=True)'
  one = Role('learner-0', (sys.executable, '-c', code, 'x'))
  with Run(tmp_path, one) as run:
    run.until_over()
  assert run.said('learner-0') == ["['x']"]


def test_they_share_a_secret_that_is_new_at_each_start(tmp_path):
  """A role of one process has no secret."""
  code = f'import os, sys; print(os.environ.get({GROUP_SECRET!r}, "none"))'
  many = role('learner-0', f'{code}; sys.exit(1)', hosts=2)
  # One after the other: the first that dies too often ends the run for all.
  for each in many, dataclasses.replace(many, name='learner-1', hosts=1):
    with Run(tmp_path, each, restarts_max=1) as run:
      run.until_over()
  by_process = [run.said(f'learner-0{i}') for i in ('', '.1')]
  said = set.union(*(set(each) for each in by_process if each))
  assert len(said) == 2 and all(len(each) == 32 for each in said)
  assert set(run.said('learner-1')) == {'none'}


@pytest.mark.parametrize(
  ('codes', 'told', 'failure'),
  [
    ('0,0', ['exited: exited with code 0'], None),
    (  # The run has not ended: its hosts count as dead.
      '0,-',
      [
        'stopped: SIGKILL: the others have left',
        'exited: died of SIGKILL; restarts used up (0 of 0)',
      ],
      'learner-0.1 died of SIGKILL; restarts used up (0 of 0)',
    ),
    (
      '143,-',
      [
        'stopped: SIGTERM: learner-0 has left',
        'exited: learner-0 exited with code 143; restarts used up (0 of 0)',
      ],
      'learner-0 exited with code 143; restarts used up (0 of 0)',
    ),
  ],
)
def test_when_one_has_left(tmp_path, codes, told, failure):
  more = {'linger_s': SHORT_S} if codes == '0,-' else {}
  with Run(tmp_path, learner(what=codes), restarts_max=0, **more) as run:
    run.until_over()
    assert run.told('learner-0.1')[-len(told) :] == told
    assert run.failure == failure


@pytest.mark.parametrize(
  ('what', 'end'),
  [('stay', 'exited with code 143'), ('deaf', 'died of SIGKILL')],
)
def test_sigterm_reaches_all(tmp_path, what, end):
  names = ('learner-0', 'learner-0.1', 'learner-0.2')
  with Run(tmp_path, learner(what=what, hosts=3)) as run:
    run.until_ready(*names)
    run.supervisor.stop(deadline_s=0.2 if what == 'deaf' else None)
    for name in names:
      assert run.told(name)[1] == 'stopped: SIGTERM'
      assert run.told(name)[-1] == f'exited: {end}'


def test_a_kill_of_the_learner_is_one_of_all_its_processes(tmp_path):
  names = ('learner-0', 'learner-0.1')
  with Run(tmp_path, learner()) as run:
    run.until_ready(*names)
    run.supervisor.kill('learner-0', 'for the test')
    run.until_ready(*names, starts=2)
    for name in names:
      assert run.told(name)[1] == 'killed: for the test'
    assert run.state('learner-0').starts == 2


@pytest.mark.parametrize('codes', ['78,1', '1,78', '78,-', '-,78'])
def test_a_configuration_that_one_refuses_is_refused(tmp_path, codes):
  """The refusal counts even if both have exited before the first poll."""
  names = ('learner-0', 'learner-0.1')
  with Run(tmp_path, learner(what=codes)) as run:
    run.supervisor.poll()
    for name, code in zip(names, codes.split(',')):
      process = psutil.Process(run.pid(name))
      zombie = lambda p=process: p.status() == psutil.STATUS_ZOMBIE  # noqa: E731
      if code != '-':  # It is not reaped yet.
        until(zombie, DEADLINE_S, f'{name} has exited')
    run.until_over()
  assert run.failure == (
    f'{names[not codes.startswith("78")]} exited with code 78: it can not run '
    'as configured'
  )
