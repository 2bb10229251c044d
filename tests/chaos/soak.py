# SPDX-License-Identifier: Apache-2.0
"""Kills processes of one run, again and again, and checks what must hold.

  python -m tests.chaos.soak --kills=100 --seed=0 --workdir=DIR [--config.a.b=c
  ...]

Any process, also two at once, also while another one starts. Exit code 0: all
checks hold; 1: one does not; 78: it can't run as configured; 130, 143: Ctrl-C,
SIGTERM.
"""

import dataclasses
import json
import pathlib
import sys

import rich.console
from absl import flags as absl_flags

from diloco.config import flags
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import learner_name
from launch.chaos import checks as run_checks
from launch.local import Interrupted, occupy, signals
from launch.program import SYNCER
from tests.chaos import soak_run
from tests.chaos.soak_run import Soak

CONFIG = 'experiments/tests_tiny.py:learners=3,steps=100000000'
# Steps that sleep leave the cores to the processes that start.
OVERRIDES = ('run.step_floor_s=0.05', 'run.restart_delay_s=0.5')


def define_flags() -> None:
  """The flags of this main."""
  flags.define_flags()
  absl_flags.DEFINE_integer('kills', 100, 'Processes to kill.', lower_bound=1)
  absl_flags.DEFINE_integer('seed', 0, 'Seed of the plan of kills.')
  absl_flags.DEFINE_float(
    'calm_s', None, 'Without kills at the end; default 5, or 60 from 50 kills.'
  )
  absl_flags.DEFINE_string('workdir', None, 'Folder of the run.')
  absl_flags.DEFINE_bool(
    'overwrite', False, 'Remove the run that the workdir holds.'
  )
  absl_flags.DEFINE_string('out', None, 'JSON file for what was found.')


def main(argv) -> int:
  config = flags.load()
  given = absl_flags.FLAGS
  if len(argv) > 1:
    raise ConfigError([f'{argv[1]}: unexpected argument'])
  if not given.workdir:
    raise ConfigError(['--workdir: is missing, such as runs/soak'])
  if config.run.log_every_steps != 1:
    raise ConfigError(
      [
        f'run.log_every_steps={config.run.log_every_steps}: must be 1, every '
        'step is counted'
      ]
    )
  workdir, lock, _ = occupy(pathlib.Path(given.workdir), given.overwrite)
  console = rich.console.Console()

  def say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

  roles = [SYNCER, *map(learner_name, range(config.protocol.learners))]
  strikes = soak_run.plan(given.kills, given.seed, roles)
  calm_s = given.calm_s
  if calm_s is None:
    calm_s = 60.0 if given.kills >= 50 else 5.0
  say(f'soak: seed {given.seed}, {given.kills} kills, in {workdir.root}')
  try:
    with lock, signals() as received:
      soak = Soak(config, flags.arguments(), workdir, strikes, say, received)
      soak.strike_all(calm_s)
  except Interrupted as stopped:
    say(f'{stopped}; no process is left')
    return 128 + stopped.number
  checks = soak.checks()
  title = f'seed {given.seed}, {given.kills} kills'
  console.print(run_checks.table(title, checks))
  if given.out:
    found = {
      'seed': given.seed,
      'kills': given.kills,
      'checks': [dataclasses.asdict(check) for check in checks],
      'growth_per_minute': [dataclasses.asdict(g) for g in soak.growths()],
    }
    pathlib.Path(given.out).write_text(json.dumps(found, indent=1) + '\n')
  return 1 if any(check.findings for check in checks) else 0


if __name__ == '__main__':
  define_flags()
  if not flags.has_config(sys.argv):
    given = [f'--config.{override}' for override in OVERRIDES]
    sys.argv[1:1] = [f'--config={CONFIG}', *given]
  flags.run(main)
