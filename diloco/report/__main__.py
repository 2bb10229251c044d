# SPDX-License-Identifier: Apache-2.0
"""Makes one page of runs and sweeps: diloco report RUN…

  diloco report RUN… [--outdir=DIR]

RUN is the folder of a run, which may still be going or have been killed, or of
a sweep; of several runs the page compares the losses. It is that of `diloco
watch`, as one file, with its tables as CSV beside it, and goes to --outdir;
figures and tables also go to standard output. Exit code 78: a folder is neither
a run nor a sweep.
"""

import pathlib
import shlex
import sys

from absl import flags

from diloco.config import flags as config_flags
from diloco.config.sections import ConfigError
from diloco.metrics.recorded_run import NoReport
from diloco.metrics.run_progress import ProgressLine
from diloco.pages import page, terminal
from diloco.watch.folders import FollowedFolders

PARENT = pathlib.Path('runs', 'reports')
RUNS_MAX = 100
_OUTDIR = flags.DEFINE_string(
  'outdir', None, f'Folder of the report; {PARENT}/NAME unless given.'
)


def main(argv) -> int:
  """Writes and shows the report; 78 where a folder is not what it should be."""
  runs = argv[1:]
  outdir = pathlib.Path(_OUTDIR.value or PARENT / _name(runs))
  try:
    with ProgressLine() as line:
      line.say('reads the folders')
      folders = [*map(pathlib.Path, runs)]
      report = FollowedFolders(folders, _command(runs)).page()
  except NoReport as error:
    raise ConfigError(str(error).splitlines()) from None
  try:
    page.check_writable(outdir)
  except OSError as error:
    problem = f'--outdir={outdir}: {error.strerror}'
    raise ConfigError([problem]) from None
  path, *_ = page.write(report, outdir)
  terminal.show(report)
  print(f'page: {path}', file=sys.stderr)
  return 0


def _name(runs: list[str]) -> str:
  first = pathlib.Path(runs[0]).resolve().name
  return f'{first}-and-{len(runs) - 1}-more' if len(runs) > 1 else first


def _command(runs: list[str]) -> str:
  outdir = [f'--outdir={_OUTDIR.value}'] if _OUTDIR.value else []
  return shlex.join(['diloco', 'report', *runs, *outdir])


if __name__ == '__main__':
  config_flags.run_of_runs(main, most=RUNS_MAX)
