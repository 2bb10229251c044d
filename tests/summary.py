# SPDX-License-Identifier: Apache-2.0
"""Ends a run of the suite: python -m tests.summary RECORD.

Prints the ten slowest tests, and of each that failed its name and last lines.
"""

import json
import pathlib
import sys

SLOWEST = 10


def text(record: str) -> str:
  """Returns the summary of a record, which has one JSON line a test."""
  tests = [json.loads(line) for line in record.splitlines()]
  slowest = sorted(tests, key=lambda test: -test['wall_s'])[:SLOWEST]
  lines = [f'{len(tests)} tests; the slowest, wall and CPU seconds:']
  lines += [
    f'{test["wall_s"]:7.1f} {test["cpu_s"]:7.1f}  {test["test"]}'
    for test in slowest
  ]
  for test in tests:
    for failure in test['failed']:
      lines += ['', f'FAILED {test["test"]} at {failure}']
  return '\n'.join(lines)


if __name__ == '__main__':
  print(text(pathlib.Path(sys.argv[1]).read_text()))
