# SPDX-License-Identifier: Apache-2.0
"""Makes one page of real runs and of the lab's sweeps: python -m diloco.report

  python -m diloco.report --workdir=DIR [--workdir=DIR …] [--outdir=DIR]

A run may still be going, or have been killed: the page says what is missing.
Tables go to standard output; page, PNG, CSV and JSON to --outdir. Exit code 78:
a folder is neither a run nor a sweep.
"""

import pathlib
import shlex
import sys

from absl import flags

from diloco.config import flags as config_flags
from diloco.config.sections import ConfigError
from diloco.metrics.recorded_run import NoReport
from diloco.metrics.run_progress import ProgressLine
from diloco.pages import pictures, report_files, terminal
from diloco.report import folders

PARENT = pathlib.Path('runs', 'reports')
_WORKDIR = flags.DEFINE_multi_string(
  'workdir', [], 'Folder of a run or a sweep; may be given several times.'
)
_OUTDIR = flags.DEFINE_string(
  'outdir', None, f'Folder of the report; {PARENT}/NAME unless given.'
)


def main(argv) -> int:
  """Writes and shows the report; 78 where a folder is not what it should be."""
  try:
    with ProgressLine() as line:
      line.say('reads the folders')
      report = folders.report(_folders(argv[1:]), _name(), _command())
  except NoReport as error:
    raise ConfigError(
      [f'--workdir: {each}' for each in str(error).splitlines()]
    ) from None
  outdir = pathlib.Path(_OUTDIR.value or PARENT / report.name)
  try:
    report_files.check_writable(outdir)
  except OSError as error:
    problem = f'--outdir={outdir}: {error.strerror}'
    raise ConfigError([problem]) from None
  with ProgressLine() as line:
    line.say('draws the pictures')
    page, *_ = report_files.write(report, outdir)
  terminal.show(report)
  for said in (pictures.missing(report), f'page: {page}'):
    if said:
      print(said, file=sys.stderr)
  return 0


def _folders(rest) -> list[pathlib.Path]:
  """Raises ConfigError where the command line is not as it should be."""
  problems = [f'{word}: unexpected argument' for word in rest]
  if not _WORKDIR.value:
    problems.append('--workdir: is missing, the folder of a run or of a sweep')
  if problems:
    raise ConfigError(problems)
  return [pathlib.Path(each) for each in dict.fromkeys(_WORKDIR.value)]


def _name() -> str:
  names = [pathlib.Path(each).resolve().name for each in _WORKDIR.value]
  more = f'-and-{len(names) - 1}-more' if len(names) > 1 else ''
  return f'{names[0]}{more}'


def _command() -> str:
  given = [f'--workdir={each}' for each in _WORKDIR.value]
  if _OUTDIR.value:
    given.append(f'--outdir={_OUTDIR.value}')
  return shlex.join(['python', '-m', 'diloco.report', *given])


if __name__ == '__main__':
  config_flags.run_without_config(main)
