# SPDX-License-Identifier: Apache-2.0
"""Learners of several processes under the supervisor: one dies, all die."""

import os
import pathlib
import re
import signal
import sys

import psutil
import pytest

from diloco.config.hardware import GROUP_SECRET
from launch.program import Role
from launch.supervisor import Supervisor
from tests.waiting import until

pytestmark = pytest.mark.beside

DEADLINE_S = 120.0
MEMBER = pathlib.Path(__file__).parent / 'member.py'


def role(name, what='stay', hosts=2):
  argv = (sys.executable, '-I', '-S', str(MEMBER), what)
  return Role(name, argv, hosts=hosts)


class Run:
  """Roles under a supervisor, and what was told of their processes."""

  def __init__(self, folder, *roles, restarts_max=3, linger_s=DEADLINE_S):
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
    )

  def __enter__(self):
    self.supervisor.__enter__()
    return self

  def __exit__(self, *exception):
    self.supervisor.stop()
    assert not any(psutil.pid_exists(event.pid) for event in self.events)

  def log(self, name):
    return self.folder / f'{name}.log'

  def until(self, condition):
    def holds() -> bool:
      if not condition():
        self.supervisor.poll()
      return condition()

    until(holds, DEADLINE_S, lambda: str(self.events))

  def until_ready(self, *names, starts=1):
    """Waits until each of these has reported its name, in its newest start."""
    self.until(lambda: all(len(self.said(n)) == starts for n in names))

  def said(self, name):
    path = self.log(name)
    return path.read_text().splitlines() if path.exists() else []

  def pid(self, name):
    started = (e for e in self.events if e.event == 'started')
    return [e.pid for e in started if e.process == name][-1]

  def told(self, name):
    return [f'{e.event}: {e.detail}' for e in self.events if e.process == name]


@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_member_takes_the_others_with_it(tmp_path, victim):
  """Its hosts meet elsewhere; the learner beside them notices nothing."""
  names = ['learner-0', 'learner-0.1']
  with Run(tmp_path, role('learner-0'), role('learner-1', hosts=3)) as run:
    run.until_ready(*names, 'learner-1', 'learner-1.1', 'learner-1.2')
    survivor = run.pid(names[1 - victim])
    os.kill(run.pid(names[victim]), signal.SIGKILL)
    run.until_ready(*names, starts=2)
    assert not psutil.pid_exists(survivor)
    assert run.told(names[1 - victim])[1:3] == [
      f'stopped: SIGKILL: {names[victim]} is dead',
      f'exited: {names[victim]} died of SIGKILL; restart 1',
    ]
    first, second = map(_address, run.said('learner-0'))
    assert first != second
    assert [first, second] == list(map(_address, run.said('learner-0.1')))
    assert [len(run.said(f'learner-1{i}')) for i in ('', '.1', '.2')] == [1] * 3


def test_who_is_which(tmp_path):
  with Run(tmp_path, role('learner-0')) as run:
    run.until_ready('learner-0', 'learner-0.1')
    assert run.said('learner-0')[0].startswith('0 of 2 at 127.0.0.1:')
    assert run.said('learner-0.1')[0].startswith('1 of 2 at 127.0.0.1:')


def test_a_role_of_one_process_is_told_nothing(tmp_path):
  code = 'import sys; print(sys.argv[1:], flush=True)'
  one = Role('learner-0', (sys.executable, '-c', code, 'x'))
  with Run(tmp_path, one) as run:
    run.until(lambda: run.supervisor.is_over)
  assert run.said('learner-0') == ["['x']"]


def test_they_share_a_secret_that_is_new_at_each_start(tmp_path):
  """A role of one process has no secret."""
  code = f'import os, sys; print(os.environ.get({GROUP_SECRET!r}, "none"))'
  argv = (sys.executable, '-c', f'{code}; sys.exit(1)')
  many, one = Role('learner-0', argv, hosts=2), Role('learner-1', argv)
  # One after the other: the first that dies too often ends the run for all.
  for role_ in many, one:
    with Run(tmp_path, role_, restarts_max=1) as run:
      run.until(lambda run=run: run.supervisor.is_over)
  by_process = [run.said(f'learner-0{i}') for i in ('', '.1')]
  said = [set(each) for each in by_process if each]
  assert len(set.union(*said)) == 2
  assert all(len(each) == 32 for each in set.union(*said))
  assert set(run.said('learner-1')) == {'none'}


def test_they_are_finished_when_all_have_left(tmp_path):
  with Run(tmp_path, role('learner-0', 'exit:0,0,0', hosts=3)) as run:
    run.until(lambda: run.supervisor.is_over)
    assert run.supervisor.failure is None
    assert run.supervisor.states()[0].state == 'finished'
    for name in ('learner-0', 'learner-0.1', 'learner-0.2'):
      assert run.told(name)[-1] == 'exited: exited with code 0'


def test_one_that_stays_behind_is_ended(tmp_path):
  """The run has not ended: its hosts count as dead, and restarts run out."""
  left = role('learner-0', 'exit:0,-')
  with Run(tmp_path, left, restarts_max=0, linger_s=0.2) as run:
    run.until(lambda: run.supervisor.is_over)
    assert run.told('learner-0.1')[-2:] == [
      'stopped: SIGKILL: the others have left',
      'exited: died of SIGKILL; restarts used up (0 of 0)',
    ]


def test_who_is_told_to_leave_tells_the_others(tmp_path):
  with Run(tmp_path, role('learner-0', 'exit:143,-'), restarts_max=0) as run:
    run.until(lambda: run.supervisor.is_over)
    assert run.told('learner-0.1')[1:] == [
      'stopped: SIGTERM: learner-0 has left',
      'exited: learner-0 exited with code 143; restarts used up (0 of 0)',
    ]


def test_sigterm_reaches_all(tmp_path):
  with Run(tmp_path, role('learner-0', hosts=3)) as run:
    run.until_ready('learner-0', 'learner-0.1', 'learner-0.2')
    run.supervisor.stop()
    for name in ('learner-0', 'learner-0.1', 'learner-0.2'):
      assert run.told(name)[1:] == [
        'stopped: SIGTERM',
        'exited: exited with code 143',
      ]


def test_all_that_ignore_sigterm_are_killed(tmp_path):
  with Run(tmp_path, role('learner-0', 'deaf')) as run:
    run.until_ready('learner-0', 'learner-0.1')
    run.supervisor.stop(deadline_s=0.2)
    assert run.told('learner-0.1')[-1] == 'exited: died of SIGKILL'


def test_a_kill_of_the_learner_is_one_of_all_its_processes(tmp_path):
  with Run(tmp_path, role('learner-0')) as run:
    run.until_ready('learner-0', 'learner-0.1')
    run.supervisor.kill('learner-0', 'for the test')
    run.until_ready('learner-0', 'learner-0.1', starts=2)
    assert run.told('learner-0')[1] == 'killed: for the test'
    assert run.told('learner-0.1')[1] == 'killed: for the test'
    assert run.supervisor.states()[0].starts == 2


@pytest.mark.parametrize('codes', ['78,1', '1,78', '78,-', '-,78'])
def test_a_configuration_that_one_refuses_is_refused(tmp_path, codes):
  """The refusal counts even if both have exited before the first poll."""
  with Run(tmp_path, role('learner-0', f'exit:{codes}')) as run:
    run.supervisor.poll()
    _wait_exited(run, codes)
    run.until(lambda: run.supervisor.is_over)
  who = 'learner-0' if codes.startswith('78') else 'learner-0.1'
  assert run.supervisor.failure == (
    f'{who} exited with code 78: it can not run as configured'
  )


def _wait_exited(run, codes):
  """Waits until the exiting processes are zombies, which are not reaped yet."""
  for name, code in zip(('learner-0', 'learner-0.1'), codes.split(',')):
    process = psutil.Process(run.pid(name))
    if code != '-':
      until(
        lambda process=process: process.status() == psutil.STATUS_ZOMBIE,
        DEADLINE_S,
        f'{name} has exited',
      )


def _address(line):
  return re.fullmatch(r'\d of \d at (.*)', line)[1]
