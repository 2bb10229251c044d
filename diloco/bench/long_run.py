# SPDX-License-Identifier: Apache-2.0
"""The old name of `python -m diloco.bench --only=long`, for one release."""

import os
import sys

NEW = ('diloco.bench', '--only=long', '--repeats=1')


def main():
  """Becomes the new command."""
  print(f'long_run is now: python -m {" ".join(NEW)}', file=sys.stderr)
  os.execv(sys.executable, [sys.executable, '-m', *NEW, *sys.argv[1:]])


if __name__ == '__main__':
  main()
