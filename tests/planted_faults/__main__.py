# SPDX-License-Identifier: Apache-2.0
"""Undoes each fix in turn and checks that its test fails.

    python -m tests.planted_faults              # all of them, one at a time
    python -m tests.planted_faults ledger pull  # whose names hold one of these
    python -m tests.planted_faults --list

Prints a row for each; the exit code is 1 where a test did not fail, or failed
for another reason, and its whole output is then shown.
"""

import argparse
import importlib.util
import pathlib
import sys
import tempfile

from tests.planted_faults.fault import copy_of_the_tree, problems, run
from tests.planted_faults.table import FAULTS


def main() -> int:
  """Runs what the command line asks for."""
  parser = argparse.ArgumentParser(
    prog='python -m tests.planted_faults', description=__doc__
  )
  parser.add_argument('words', nargs='*', help='parts of names; default: all')
  parser.add_argument('--list', action='store_true', help='run nothing')
  asked = parser.parse_args()
  chosen = [
    each
    for each in FAULTS
    if not asked.words or any(word in each.name for word in asked.words)
  ]
  if asked.list:
    for each in chosen:
      print(f'{each.name:<32} {each.test}')
    return 0
  if importlib.util.find_spec('pytest') is None:
    parser.error('pytest is missing: . .venv-test/bin/activate')
  missed = []
  with (
    tempfile.TemporaryDirectory() as folder,
    copy_of_the_tree(pathlib.Path(folder) / 'tree') as tree,
  ):
    for each in chosen:
      if wrong := problems(each, tree):
        print(f'{each.name:<32} ---- {"; ".join(wrong)}', flush=True)
        missed.append(each)
        continue
      outcome = run(each, tree)
      verdict = 'found' if outcome.found else 'MISSED'
      seconds = f'{outcome.took_s:5.1f} s'
      print(
        f'{each.name:<32} {verdict:<6} {seconds} {outcome.line[:90]}',
        flush=True,
      )
      if not outcome.found:
        print(outcome.output)
        missed.append(each)
  print(f'{len(chosen)} faults, {len(missed)} not found')
  return 1 if missed or not chosen else 0


if __name__ == '__main__':
  sys.exit(main())
