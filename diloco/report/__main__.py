# SPDX-License-Identifier: Apache-2.0
"""Makes one page of real runs and of the lab's sweeps: python -m diloco.report

  python -m diloco.report RUN [RUN …] [--outdir=DIR]

A run may still be going, or have been killed: the page says what is missing.
Tables go to standard output; page, PNG, CSV and JSON to --outdir. Exit code 78:
a folder is neither a run nor a sweep.
"""

import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from diloco.config import flags as config_flags
from diloco.config.sections import ConfigError
from diloco.metrics.recorded_run import NoReport
from diloco.metrics.run_progress import ProgressLine
from diloco.pages import pictures, report_files, terminal
from diloco.report import folders

PARENT = pathlib.Path('runs', 'reports')
RUNS_MAX = 100
_OUTDIR = flags.DEFINE_string(
  'outdir', None, f'Folder of the report; {PARENT}/NAME unless given.'
)


def main(argv) -> int:
  """Writes and shows the report; 78 where a folder is not what it should be."""
  runs = argv[1:]
  try:
    with ProgressLine() as line:
      line.say('reads the folders')
      places = [pathlib.Path(each) for each in runs]
      report = folders.report(places, _name(runs), _command(runs))
  except NoReport as error:
    raise ConfigError(str(error).splitlines()) from None
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


def _name(runs: Sequence[str]) -> str:
  names = [pathlib.Path(each).resolve().name for each in runs]
  more = f'-and-{len(names) - 1}-more' if len(names) > 1 else ''
  return f'{names[0]}{more}'


def _command(runs: Sequence[str]) -> str:
  given = [*runs]
  if _OUTDIR.value:
    given.append(f'--outdir={_OUTDIR.value}')
  return shlex.join(['python', '-m', 'diloco.report', *given])


if __name__ == '__main__':
  config_flags.run_of_runs(main, most=RUNS_MAX)
