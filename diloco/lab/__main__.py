# SPDX-License-Identifier: Apache-2.0
"""Trains many learners in one process: python -m diloco.lab --config=…

  python -m diloco.lab --config=experiments/NAME.py --workdir=DIR
  python -m diloco.lab --config=experiments/NAME.py --workdir=DIR --sweep \\
    [--seeds=3] [--jobs=2] [--only=TEXT]
  python -m diloco.lab --config=FILE --workdir=DIR --sweep=outer.lr=0.3,0.6,1.0

The first command makes one run, shows its progress, and writes into DIR the
files of a real run, with simulated times: `python -m diloco.report
--workdir=DIR` makes a page of them, `python -m diloco.generate --workdir=DIR`
samples the final model. After an interruption the same command
resumes from the last checkpoint (`lab.checkpoint_steps`). The second makes the
runs of the file's `sweep(add)`, over several seeds, some concurrently; finished
runs are not repeated. The third makes those of some values of one key, each
compared with the first, of any file.
Exit code 78: the configuration can't be run.
"""

import os
import pathlib
import runpy
import signal
import sys
from collections.abc import Callable

from absl import flags as absl_flags

from diloco.config import flags, run_config
from diloco.config.sections import ConfigError
from diloco.lab import sweep
from diloco.metrics.workdir import Workdir
from diloco.run import logs

_WORKDIR = absl_flags.DEFINE_string('workdir', None, 'Folder of the results.')
OF_FILE = 'file'
_SWEEP = absl_flags.DEFINE_string(
  'sweep',
  None,
  'Makes all variants of the file; with KEY=V1,V2,… those of that key.',
)
_SEEDS = absl_flags.DEFINE_integer(
  'seeds', 3, 'Runs of each variant, each with its own seed.', lower_bound=1
)
_JOBS = absl_flags.DEFINE_integer(
  'jobs', 2, 'Runs at a time, one thread each.', lower_bound=1
)
_ONLY = absl_flags.DEFINE_string('only', '', 'Variants whose label has this.')
_PARAMETERS = absl_flags.DEFINE_bool(
  'parameters', True, 'Leaves the final model in WORKDIR/parameters.'
)
_COMPILED = absl_flags.DEFINE_string(
  'compiled',
  None,
  'Folder of compiled programs; WORKDIR/compiled unless given.',
)


def main(_) -> int:
  logs.keep_ours()
  workdir = pathlib.Path(_WORKDIR.value)
  return (_sweep if _SWEEP.value else _run)(workdir)


def _run(workdir: pathlib.Path) -> int:
  config = flags.load()
  from diloco.lab import run

  compiled = pathlib.Path(_COMPILED.value or Workdir(workdir).compiled)
  return run.make(config, workdir, compiled, _PARAMETERS.value)


def _sweep(workdir: pathlib.Path) -> int:
  from diloco.lab import sweep_runner

  with flags.refusing(ValueError):
    make = _variants(flags.config_file())
  # Stopped like by Ctrl-C: the processes of its runs end, too.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with flags.refusing(ValueError):
    rows = [v for v in sweep.variants(make) if _ONLY.value in v.label]
  made = flags.load(
    build=lambda base: sweep_runner.make_configs(base.to_dict(), rows)
  )
  sweep_runner.check(made, rows, _SEEDS.value, workdir)
  return sweep_runner.make(rows, _SEEDS.value, _JOBS.value, workdir)


def _variants(path: str) -> Callable:
  """Returns the `sweep(add)` that is asked for."""
  if _SWEEP.value != OF_FILE:
    return sweep.of_values(_SWEEP.value, run_config.key_types())
  make = runpy.run_path(path).get('sweep')
  if make is None:
    raise ConfigError(
      [
        f'--config={path}: has no sweep(add); --sweep=KEY=V1,V2 names values '
        'of a key, such as outer.lr=0.3,0.6'
      ]
    )
  return make


if __name__ == '__main__':
  sys.argv = [f'{w}={OF_FILE}' if w == '--sweep' else w for w in sys.argv]
  flags.define_flags()
  absl_flags.mark_flag_as_required('workdir')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  flags.run(main)
