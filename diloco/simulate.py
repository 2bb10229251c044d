# SPDX-License-Identifier: Apache-2.0
"""Simulates a fleet: runs the study that a configuration asks for.

  python -m diloco.simulate --config=experiments/NAME.py[:quicktest] \\
    [--config.study.seeds=5 ...] [--outdir=DIR]

Tables go to standard output, progress to standard error, CSV, JSON, PNG and a
page to DIR; same seed, same bytes. Exit code 78: it can't run as configured.
"""

import dataclasses
import functools
import importlib
import pathlib
import shlex
import time

from absl import flags as absl_flags

from diloco import flags, simulation_config
from diloco.config_values import ConfigError
from diloco.pages import files, pictures, progress, terminal
from diloco.sim.failures import TraceError

EXAMPLE = 'experiments/goodput.py'
PARENT = pathlib.Path('runs', 'simulated')


def define_flags() -> None:
  flags.define_flags()
  said = f'Folder of the report; {PARENT}/NAME unless given.'
  absl_flags.DEFINE_string('outdir', None, said)


def main(argv) -> int:
  began_s = time.monotonic()
  config = flags.load(build=simulation_config.build)
  line = progress.Line()
  try:
    folder = _folder(argv, config.name)
    report = _report(config, line.say)
  except ConfigError as error:
    line.end()
    flags.exit_config(error)
  line.end()
  again = shlex.join(['python', '-m', 'diloco.simulate', *flags.arguments()])
  report = dataclasses.replace(report, command=again)
  terminal.show(report)
  page, *_ = files.write(report, folder)
  if missing := pictures.missing(report):
    line.stay(missing)
  line.stay(f'page: {page}')
  line.stay(f'wall time: {time.monotonic() - began_s:.1f} s')
  return 0


def _report(config, say):
  study = importlib.import_module(f'diloco.studies.{config.study.kind}')
  try:
    return study.report(config, say)
  except (TraceError, FileNotFoundError) as error:
    raise ConfigError([f'failures.trace: {error}']) from None


def _folder(argv, name: str) -> pathlib.Path:
  """The folder of the report; raises ConfigError if it can't be written."""
  if len(argv) > 1:
    raise ConfigError([f'{argv[1]}: unexpected argument'])
  folder = pathlib.Path(absl_flags.FLAGS.outdir or PARENT / name)
  try:
    files.check_writable(folder)
  except OSError as error:
    raise ConfigError([f'--outdir={folder}: {error.strerror}']) from None
  return folder


if __name__ == '__main__':
  define_flags()
  flags.run(main, functools.partial(flags.parse_or_exit, example=EXAMPLE))
