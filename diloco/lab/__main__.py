# SPDX-License-Identifier: Apache-2.0
"""Trains many learners in one process: python -m diloco.lab --config=…

  python -m diloco.lab --config=experiments/NAME.py --workdir=DIR
  python -m diloco.lab --config=experiments/NAME.py --sweep [--workdir=DIR] \\
    [--seeds=3 | --until_width=0.003] [--half=second] [--jobs=2] [--only=TEXT]
  python -m diloco.lab --config=FILE --workdir=DIR --sweep=outer.lr=0.3,0.6,1.0

The first command makes one run, shows its progress, and writes into DIR the
files of a real run, with simulated times: `python -m diloco.report DIR` makes
a page of them, `python -m diloco.generate DIR` samples the final model. After
an interruption the same command resumes from the last checkpoint
(`lab.checkpoint_steps`). The second makes the runs of the file's `sweep(add)`,
over several seeds, some concurrently, in runs/NAME unless told where; finished
runs are not repeated, nor those that were kept in `experiments/records`. With
--until_width seeds are added until all differences are known so well. The third
makes those of some values of one key, each compared with the first, of any
file.
Exit code 78: the configuration can't be run.
"""

import os
import pathlib
import signal
import sys

from absl import flags as absl_flags

from diloco.config import flags
from diloco.config.sections import ConfigError
from diloco.library import training
from diloco.run import logs
from diloco.sweeps import making

_WORKDIR = absl_flags.DEFINE_string('workdir', None, 'Folder of the results.')
_JOBS = absl_flags.DEFINE_integer(
  'jobs', 2, 'Runs at a time, one thread each.', lower_bound=1
)
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
  return _sweep() if making.is_asked() else _run()


def _run() -> int:
  if _WORKDIR.value is None:
    raise ConfigError('--workdir: is missing, the folder of the results')
  workdir = pathlib.Path(_WORKDIR.value)
  config = flags.load()
  training.lab(
    config, workdir, compiled=_COMPILED.value, keeps_model=_PARAMETERS.value
  )
  return 0


def _sweep() -> int:
  from diloco.lab import sweep_runner

  if _WORKDIR.value is None:
    name = pathlib.Path(flags.config_file()).stem
    absl_flags.FLAGS.workdir = str(pathlib.Path('runs') / name)
  # Stopped like by Ctrl-C: the processes of its runs end, too.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  return sweep_runner.make(making.plan(of_processes=False), _JOBS.value)


if __name__ == '__main__':
  flags.define_short_flags()
  sys.argv = flags.in_full(making.spelled_out(sys.argv))
  making.define_flags()
  flags.define_flags()
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  flags.run(main)
