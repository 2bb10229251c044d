# SPDX-License-Identifier: Apache-2.0
"""Options of the whole suite."""

import pathlib

PARTS = ('together', 'alone')


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
