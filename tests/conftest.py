# SPDX-License-Identifier: Apache-2.0
"""Options of the whole suite, and the record that its summary is made of."""

import json
import os
import pathlib
import time

import pytest

PARTS = ('together', 'alone')
# Set by run.sh: a file with one line for each test; tests/summary.py reads it.
RECORD = 'DILOCO_TEST_RECORD'
RECORD_PATH = os.environ.get(RECORD)
LAST_LINES = 15  # Of a failure, in the summary.


def pytest_addoption(parser):
  parser.addoption(
    '--rewrite',
    action='store_true',
    help='write what the machines say now into the transcripts',
  )
  parser.addoption(
    '--part',
    choices=PARTS,
    help='only tests that may run beside others, or only those that may not',
  )


def pytest_collection_finish(session):
  # A test may run pytest by itself; workers have begun.
  os.environ.pop(RECORD, None)


def pytest_ignore_collect(collection_path, config):
  # Else every module would be imported for the few tests that run alone. A
  # file that is asked for by name is not left out: that would be an error.
  named = {
    pathlib.Path(arg.partition('::')[0]).resolve() for arg in config.args
  }
  if config.getoption('--part') != 'alone' or collection_path.suffix != '.py':
    return None
  if collection_path in named:
    return None
  text = collection_path.read_text()
  return None if 'mark.alone' in text or 'mark.soak' in text else True


def pytest_collection_modifyitems(config, items):
  # No `-m`: that is left to the caller of tests/run.sh.
  part = config.getoption('--part')
  if part is None:
    return
  chosen, others = [], []
  for item in items:
    # A soak measures, whatever the rest of its file does.
    is_alone = any(map(item.get_closest_marker, ('alone', 'soak')))
    (chosen if is_alone == (part == 'alone') else others).append(item)
  config.hook.pytest_deselected(items=others)
  items[:] = chosen


def _cpu_s() -> float:
  """CPU seconds of this process and of all children it has waited for."""
  used = os.times()
  return used.user + used.system + used.children_user + used.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
  began_s, began_cpu_s = time.perf_counter(), _cpu_s()
  item.failed = []
  try:
    return (yield)
  finally:
    if RECORD_PATH:
      line = {
        'test': item.nodeid,
        'wall_s': time.perf_counter() - began_s,
        'cpu_s': _cpu_s() - began_cpu_s,
        'failed': item.failed,
      }
      # One write: the workers append to one file.
      with open(RECORD_PATH, 'a') as file:
        file.write(json.dumps(line) + '\n')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  report = yield
  if report.failed:
    lines = report.longreprtext.splitlines()[-LAST_LINES:]
    item.failed.append(f'{report.when}:\n' + '\n'.join(lines))
  return report
