# SPDX-License-Identifier: Apache-2.0
"""Stands in for one host of a learner: reports its name, then obeys.

  python member.py WHAT --hosts=N --host=I --coordinator=ADDRESS

WHAT: 'stay', until a signal; 'deaf', also after SIGTERM; 'exit:CODE,CODE,…',
host i leaves with the i-th code, and stays if that is '-'.
"""

import signal
import sys


def main(what, *flags):
  given = dict(flag.lstrip('-').split('=') for flag in flags)
  if what == 'deaf':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
  else:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
  print(f'{given["host"]} of {given["hosts"]} at {given["coordinator"]}')
  sys.stdout.flush()
  if what.startswith('exit:'):
    code = what.removeprefix('exit:').split(',')[int(given['host'])]
    if code != '-':
      sys.exit(int(code))
  while True:
    signal.pause()


if __name__ == '__main__':
  main(*sys.argv[1:])
