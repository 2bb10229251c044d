# SPDX-License-Identifier: Apache-2.0
"""A process that touches no file any more hangs, unless nobody looked."""

import os

from launch.heartbeat import LATE_S, SILENT_S, Heartbeat


def _look(heartbeat: Heartbeat, begin_s: float, seconds: float) -> bool:
  """Looks once a second; returns whether it was ever silent."""
  times_s = (begin_s + i for i in range(1, round(seconds) + 1))
  return any(heartbeat.is_silent(at_s) for at_s in times_s)


def test_a_process_is_waited_for_until_its_first_touch(tmp_path):
  path = tmp_path / 'alive'
  path.touch()  # By the process before.
  heartbeat = Heartbeat(path)
  assert not _look(heartbeat, 0.0, 5 * SILENT_S)
  os.utime(path, ns=(1, 1))
  assert not _look(heartbeat, 100.0, SILENT_S)
  assert heartbeat.is_silent(101.0 + SILENT_S + 0.5)


def test_one_that_goes_on_is_not_silent(tmp_path):
  path, heartbeat = tmp_path / 'alive', Heartbeat(tmp_path / 'alive')
  for i in range(30):
    path.touch()
    os.utime(path, ns=(i, i))
    assert not heartbeat.is_silent(float(i))
  assert _look(heartbeat, 30.0, SILENT_S)


def test_who_was_stopped_itself_looks_once_more(tmp_path):
  path = tmp_path / 'alive'
  heartbeat = Heartbeat(path)
  path.touch()
  assert not heartbeat.is_silent(0.0)
  later_s = 10 * SILENT_S
  assert not heartbeat.is_silent(later_s)
  assert not heartbeat.is_silent(later_s + LATE_S / 2)
  assert _look(heartbeat, later_s + LATE_S / 2, SILENT_S + 1)
