# SPDX-License-Identifier: Apache-2.0
"""Starts any command by one name: python -m diloco COMMAND …

The script `diloco` is the same. Each command is a main of its own, which is
started in place of this process; none is imported here. An experiment that is
a program by itself is named by its file: python -m diloco experiments/NAME.py …
"""

import difflib
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

from diloco import __version__

HERE = pathlib.Path(__file__).parent
EXIT_CONFIG = 78
# Group: name: module, what it does.
GROUPS = {
  'Train': {
    'train': ('launch.train', 'trains on a text of yours on this machine'),
    'local': ('launch.local', 'makes the run of a configuration here'),
    'begin': ('diloco.begin', 'begins a run where a data-parallel one is'),
    'launch': ('launch.main', 'starts a run in a cloud or a cluster'),
    'lab': ('diloco.lab', 'trains many learners in one process'),
    'config': ('diloco.config', 'lists all keys of a configuration'),
  },
  'Look at a run': {
    'watch': ('diloco.watch', 'serves a page of a run while it goes on'),
    'report': ('diloco.report', 'makes a page of one or several runs'),
    'tape': ('diloco.tape', 'shows the decisions of a run as a timeline'),
    'replay': ('diloco.replay', 'makes a run again and compares every round'),
    'to-wandb': (
      'diloco.report.to_wandb',
      'hands the scalars of a run to Weights & Biases',
    ),
  },
  'Use its model': {
    'generate': ('diloco.generate', 'draws text from the model of a run'),
    'evaluate': ('diloco.evaluate', 'measures the loss of the model of a run'),
    'export': ('diloco.export', 'writes the model of a run for other tools'),
  },
  'Prepare data': {
    'write-records': ('diloco.write_records', 'makes files of documents'),
    'index-data': ('diloco.index_data', 'indexes files of documents'),
  },
  'Plan': {
    'plan': ('diloco.plan', 'says what a run would need'),
    'simulate': (
      'diloco.simulate',
      'simulates fleets of up to millions of chips',
    ),
  },
  'Test and measure': {
    'chaos': ('launch.chaos', 'makes a run under a plan of faults'),
    'swarm': ('diloco.swarm', 'tests the protocol on random failures'),
    'bench': ('diloco.bench', 'measures speed, stalls and sizes here'),
  },
  'Processes of a run, which the launchers start': {
    'syncer': ('diloco.syncer', 'holds and merges the model'),
    'syncer-shard': ('diloco.syncer_shard', 'holds a part of it'),
    'learner': ('diloco.learner', 'trains a copy of it'),
    'evaluator': ('diloco.evaluator', 'evaluates it while the run goes on'),
    'rendezvous': (
      'launch.rendezvous',
      'is where the slices of a learner meet',
    ),
    'agent': ('launch.agent', 'starts the processes of a host of a slice'),
  },
}
COMMANDS = {
  name: row for group in GROUPS.values() for name, row in group.items()
}
# Gone with the next release: what to call instead.
SUCCESSORS = {
  'sweep': ('lab', '--sweep'),
  'follow': ('replay',),
  'long-run': ('bench', '--only=long', '--repeats=1'),
}
REMOVED = {
  'netbench': 'was removed after 0.1.0; docs/links.md has what it measured'
}
# In a checkout they stand beside diloco, installed in it.
BESIDE, EXPERIMENTS = 'launch', 'experiments'
EXPERIMENT = re.compile(rf'{EXPERIMENTS}/(\w+)\.py')


def usage() -> str:
  """Returns one line for each command, group by group."""
  lines = ['diloco COMMAND [RUN or other argument] [--flag=value …]']
  for group, commands in GROUPS.items():
    lines += ['', f'{group}:']
    lines += [f'  {name:14}{text}' for name, (_, text) in commands.items()]
  return '\n'.join(
    [
      *lines,
      '',
      'diloco COMMAND --help lists the flags of a command; diloco --version.',
      'diloco experiments/NAME.py … runs an experiment that is a program.',
    ]
  )


def problem(command: str) -> str | None:
  """Returns what is wrong with a command; None: nothing."""
  if EXPERIMENT.fullmatch(command):
    beside = HERE if (HERE / EXPERIMENTS).is_dir() else HERE.parent
    if any((path / command).is_file() for path in (pathlib.Path(), beside)):
      return None
    return f'{command}: no such file here, nor among those of diloco'
  if command in REMOVED:
    return f'{command}: {REMOVED[command]}'
  if command not in COMMANDS:
    near = difflib.get_close_matches(command, COMMANDS, 1)
    hint = f', did you mean {near[0]}?' if near else ''
    return f'{command}: unknown command{hint} (diloco --help lists all)'
  return None


def module_of(command: str) -> str:
  """Returns the module that a command starts."""
  experiment = EXPERIMENT.fullmatch(command)
  module = (
    f'{EXPERIMENTS}.{experiment[1]}' if experiment else COMMANDS[command][0]
  )
  package = module.partition('.')[0]
  is_inside = package in (BESIDE, EXPERIMENTS) and (HERE / package).is_dir()
  return f'diloco.{module}' if is_inside else module


def _say(text: str) -> None:
  """Prints a text, of which `| head` may read but a part."""
  try:
    print(text, flush=True)
  except BrokenPipeError:  # Else Python says so, too, when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
  """Becomes the command, or returns an exit code."""
  words = list(sys.argv[1:] if argv is None else argv)
  if not words or words[0] in ('-h', '--help', '--helpfull', 'help'):
    _say(usage())
    return 0
  if words[0] in ('-V', '--version'):
    _say(f'diloco {__version__}')
    return 0
  if words[0] in SUCCESSORS:
    now = SUCCESSORS[words[0]]
    text = f'diloco {words[0]} is now diloco {" ".join(now)}'
    print(f'note: {text}, and goes with the next release', file=sys.stderr)
    words = [*now, *words[1:]]
  if reason := problem(words[0]):
    print(f'error: {reason}', file=sys.stderr)
    return EXIT_CONFIG
  # For the command's own processes, too: configurations and models of the user
  # are looked for in this folder, `launch` and `experiments` in the checkout.
  checkout = '' if (HERE / BESIDE).is_dir() else str(HERE.parent)
  places = [os.getcwd(), checkout, os.environ.get('PYTHONPATH', '')]
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, places))
  is_experiment = EXPERIMENT.fullmatch(words[0])
  if not (is_experiment and pathlib.Path(words[0]).is_file()):
    words = ['-m', module_of(words[0]), *words[1:]]
  print(end='', flush=True)
  os.execv(sys.executable, [sys.executable, *words])
  raise AssertionError(shlex.join(words))  # It does not come back.


if __name__ == '__main__':
  sys.exit(main())
