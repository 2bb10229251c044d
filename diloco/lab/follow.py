# SPDX-License-Identifier: Apache-2.0
"""The older name of `python -m diloco.replay`, for one release."""

import runpy
import sys

EXIT_CONFIG = 78

if __name__ == '__main__':
  print(
    'diloco.lab.follow is now diloco.replay (diloco replay)', file=sys.stderr
  )
  if gone := [x for x in sys.argv[1:] if x.lstrip('-') == 'notapes']:
    print(
      f'error: {gone[0]}: is gone; python -m diloco.lab makes the run of a '
      'configuration by itself, and prints the CRC of its parameters',
      file=sys.stderr,
    )
    sys.exit(EXIT_CONFIG)
  runpy.run_module('diloco.replay', run_name='__main__', alter_sys=True)
