# SPDX-License-Identifier: Apache-2.0
"""Options of the whole suite."""

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
