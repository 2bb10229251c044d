# SPDX-License-Identifier: Apache-2.0
"""A process that has imported what a learner needs, and stands by for one.

  python -m diloco.learner.standby

A learner that has lost a slice goes on in new processes, which would take
seconds to import JAX. The launcher keeps one of these for each host of such a
learner, with the environment that its processes have. It reads one line of
JSON, with a module, its arguments and further variables, and runs that; at the
end of its input it exits.
"""

import importlib
import json
import os
import runpy
import sys

# What the learner's command imports once it has read its flags.
NEEDED = 'diloco.run.command', 'diloco.learner.hosts.host_main'


def main():
  """Imports, waits, and becomes the process that it is told to be."""
  for name in NEEDED:
    importlib.import_module(name)
  if not (line := sys.stdin.readline()):
    return
  told = json.loads(line)
  os.environ.update(told['environment'])
  sys.argv = [told['module'], *told['arguments']]
  runpy.run_module(told['module'], run_name='__main__', alter_sys=True)


if __name__ == '__main__':
  main()
