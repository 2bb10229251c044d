# SPDX-License-Identifier: Apache-2.0
"""Starts any command by one name: python -m diloco COMMAND …

The script `diloco` is the same. Each command is a main of its own, which is
started in place of this process; none is imported here.
"""

import difflib
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]  # The checkout.
EXIT_CONFIG = 78
# Name: module, what it does.
COMMANDS = {
  'train': ('launch.train', 'trains on a text of yours on this machine'),
  'local': ('launch.local', 'makes the run of a configuration on this machine'),
  'launch': ('launch.main', 'starts a run on TPU VMs, on GKE or under Slurm'),
  'generate': ('diloco.generate', 'draws text from the model of a run'),
  'evaluate': ('diloco.evaluate', 'measures the loss of the model of a run'),
  'export': ('diloco.export', 'writes the model of a run for other tools'),
  'report': ('diloco.report', 'makes a page of one or several runs'),
  'tape': ('diloco.tape', 'shows the decisions of a run as a timeline'),
  'replay': ('diloco.replay', 'makes a run again and compares every round'),
  'lab': ('diloco.lab', 'trains many learners in one process'),
  'simulate': (
    'diloco.simulate',
    'simulates fleets of up to millions of chips',
  ),
  'plan': ('diloco.plan', 'says what a run would need'),
  'swarm': ('diloco.swarm', 'tests the protocol on random failures'),
  'write-records': ('diloco.write_records', 'makes files of documents of text'),
  'index-data': ('diloco.index_data', 'indexes files of documents'),
  'make-task': ('diloco.make_task', 'makes a file of questions of a text'),
}
OF_CHECKOUT = 'launch.'  # Modules that no wheel holds.


def usage() -> str:
  """Returns one line for each command."""
  lines = [f'  {name:14}{text}' for name, (_, text) in COMMANDS.items()]
  return '\n'.join(
    [
      'diloco COMMAND [--flag=value …]',
      '',
      *lines,
      '',
      'diloco COMMAND --help says which flags a command takes.',
    ]
  )


def problem(command: str) -> str | None:
  """Returns what is wrong with a command; None: nothing."""
  if command not in COMMANDS:
    near = difflib.get_close_matches(command, COMMANDS, 1)
    hint = f', did you mean {near[0]}?' if near else ''
    return f'{command}: unknown command{hint} (diloco --help lists all)'
  module = COMMANDS[command][0]
  path = ROOT / module.replace('.', '/')
  if module.startswith(OF_CHECKOUT) and not path.with_suffix('.py').is_file():
    return (
      f'{command}: needs a checkout of the repository: git clone it, and '
      'pip install -e . there'
    )
  return None


def main(argv: Sequence[str] | None = None) -> int:
  """Becomes the command, or returns an exit code."""
  words = list(sys.argv[1:] if argv is None else argv)
  if not words or words[0] in ('-h', '--help', '--helpfull', 'help'):
    print(usage())
    return 0
  if found := problem(words[0]):
    print(f'error: {found}', file=sys.stderr)
    return EXIT_CONFIG
  # For the command's own processes, too: configurations and models of the user
  # are looked for in this folder, `launch` and `experiments` in the checkout.
  places = [os.getcwd(), str(ROOT), os.environ.get('PYTHONPATH', '')]
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, places))
  module = COMMANDS[words[0]][0]
  sys.stdout.flush()
  os.execv(sys.executable, [sys.executable, '-m', module, *words[1:]])
  raise AssertionError(shlex.join(words))  # It does not come back.


if __name__ == '__main__':
  sys.exit(main())
