# SPDX-License-Identifier: Apache-2.0
"""Simulates a fleet: the study of a configuration, or a run that was made.

  python -m diloco.simulate --config=experiments/NAME.py[:quicktest] \\
    [--config.study.seeds=5 ...] [--outdir=DIR]
  python -m diloco.simulate --config=experiments/goodput.py --check
  python -m diloco.simulate --replay=RUN [--seeds=8]

The second compares elastic learners with the paper's Table 1, and ends with 1
if they are too far from it. The third takes the kills of a real run's folder
and predicts its goodput.
Tables go to standard output, progress to standard error, CSV, JSON and a page
to DIR; same seed, same bytes. Exit code 78: it can't run as configured.
"""

import dataclasses
import pathlib
import shlex
import time

from absl import flags as absl_flags

from diloco import callables
from diloco.config import flags, simulation
from diloco.config.sections import ConfigError
from diloco.library import questions
from diloco.metrics.run_progress import ProgressLine
from diloco.pages import page, terminal

EXAMPLE = 'experiments/goodput.py'
PARENT = pathlib.Path('runs', 'simulated')

callables.make_callable(__name__)


def define_flags() -> None:
  flags.define_flags()
  text = f'Folder of the report; {PARENT}/NAME unless given.'
  absl_flags.DEFINE_string('outdir', None, text)
  absl_flags.DEFINE_string('replay', None, 'Folder of a run that was made.')
  absl_flags.DEFINE_bool('check', False, "Compares with the paper's figures.")
  text = 'Predictions of --replay.'
  absl_flags.DEFINE_integer('seeds', 8, text, lower_bound=1)


def parse(argv) -> list[str]:
  """Parses the command line; --replay takes no --config."""
  if any(word.lstrip('-').startswith('replay') for word in argv[1:]):
    return flags.parse_without_config(argv)
  return flags.parse(argv, example=EXAMPLE)


def main(argv) -> int:
  began_s = time.monotonic()
  replayed, checks = absl_flags.FLAGS.replay, absl_flags.FLAGS.check
  if replayed and checks:
    raise ConfigError(['--check: is of a study, not of --replay'])
  config = None if replayed else flags.load(build=simulation.build)
  name = config.name if config else f'replay-{pathlib.Path(replayed).name}'
  folder, holds = _folder(argv, f'{name}-check' if checks else name), True
  with ProgressLine() as line:
    if checks:
      report, holds = questions.check(config, line.say)
    else:
      report = questions.simulate(
        config, replay=replayed, seeds=absl_flags.FLAGS.seeds, say=line.say
      )
    if config:
      words = ['python', '-m', 'diloco.simulate', *flags.arguments()]
      words += ['--check'] * checks
      report = dataclasses.replace(report, command=shlex.join(words))
    path, *_ = page.write(report, folder)
  terminal.show(report)
  line.stay(f'page: {path}')
  line.stay(f'wall time: {time.monotonic() - began_s:.1f} s')
  return 0 if holds else 1


def _folder(argv, name: str) -> pathlib.Path:
  """The folder of the report; raises ConfigError if it can't be written."""
  if len(argv) > 1:
    raise ConfigError([f'{argv[1]}: unexpected argument'])
  folder = pathlib.Path(absl_flags.FLAGS.outdir or PARENT / name)
  try:
    page.check_writable(folder)
  except OSError as error:
    raise ConfigError([f'--outdir={folder}: {error.strerror}']) from None
  return folder


if __name__ == '__main__':
  define_flags()
  flags.run(main, parse)
