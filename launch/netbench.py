# SPDX-License-Identifier: Apache-2.0
"""The old name of `python -m tests.netbench`, for one release."""

import os
import pathlib
import sys

NEW = 'tests.netbench'
CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
EXIT_CONFIG = 78


def main() -> int:
  """Becomes the new command, which only a checkout has."""
  print(f'netbench is now: python -m {NEW}, in a checkout', file=sys.stderr)
  if not CHECKOUT.joinpath(*NEW.split('.')).is_dir():
    return EXIT_CONFIG
  places = [str(CHECKOUT), os.environ.get('PYTHONPATH', '')]
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, places))
  os.execv(sys.executable, [sys.executable, '-m', NEW, *sys.argv[1:]])


if __name__ == '__main__':
  sys.exit(main())
