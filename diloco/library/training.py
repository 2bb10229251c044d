# SPDX-License-Identifier: Apache-2.0
"""Makes a run from its configuration to its end: as processes, or in this one.

Both take a configuration as a file of --config, as a nested mapping of the keys
that differ from their defaults, or as a checked value, and return the run.
"""

import collections
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping

from diloco.config import config_files, own_code, run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.library.run import Run
from diloco.metrics.workdir import Workdir

Given = str | os.PathLike | Mapping | RunConfig
LINES_KEPT = 20  # Of a launcher that failed.
EXIT_CONFIG = 78


def lab(
  config: Given,
  workdir: str | os.PathLike | None = None,
  changes: Mapping[str, object] | None = None,
  compiled: str | os.PathLike | None = None,
  keeps_model: bool = True,
  say: Callable[[str], object] | None = print,
) -> Run:
  """Trains all learners of a run in this process, under a simulated clock.

  The gradients, the protocol machines, the codecs and the outer optimizer are
  the real ones; only time is simulated. The same configuration gives the same
  bits. With `lab.system` the same learners train data-parallel instead.

  Args:
    config: a file of --config such as 'experiments/train.py', or a mapping of
      the keys that differ from their defaults, or a `RunConfig`.
    workdir: folder of the run, where it resumes after an interruption; None: a
      temporary one, which goes with the returned value.
    changes: values by dotted key, such as {'protocol.total_steps': 100}.
    compiled: folder of compiled programs; None: WORKDIR/compiled, or none at
      all if there is no workdir.
    keeps_model: whether the final parameters stay in the folder.
    say: takes the final loss, and a CRC of the parameters; None: nothing is
      said, nor shown on standard error while it trains.

  Returns:
    The run, which is over; its times are simulated seconds.

  Raises:
    ConfigError: the configuration can't be run; lists each problem.
  """
  checked = _checked(config, changes)
  # Only now: it imports jax.
  from diloco.lab import run as lab_run

  temporary = None
  if workdir is None:
    temporary = tempfile.TemporaryDirectory(prefix='diloco-lab-')
    folder = pathlib.Path(temporary.name)
  else:
    folder = pathlib.Path(workdir)
    compiled = compiled or Workdir(folder).compiled
  cache = pathlib.Path(compiled) if compiled else None
  lab_run.make(checked, folder, cache, keeps_model, say)
  return Run(folder, temporary)


def train(
  config: Given,
  workdir: str | os.PathLike,
  changes: Mapping[str, object] | None = None,
  overwrite: bool = False,
  say: Callable[[str], object] = print,
) -> Run:
  """Trains with real processes on this machine, from first to last step.

  It is `diloco local`: a syncer and the learners are started, restarted where
  they die, and the result is evaluated. A run that was stopped goes on where
  the same call is made again.

  Args:
    config: as that of `lab`.
    workdir: folder of the run.
    changes: as those of `lab`.
    overwrite: removes a run that the folder holds.
    say: takes the launcher's lines, one by one, as they come.

  Returns:
    The run, which is over and evaluated; times are seconds.

  Raises:
    ConfigError: it can't be run as configured, or the folder is in use.
    RuntimeError: it failed; the message has the last lines.
  """
  keys = config_files.given(config, changes)
  _checked(keys, None)
  with tempfile.TemporaryDirectory(prefix='diloco-train-') as scratch:
    path = pathlib.Path(scratch, 'config.py')
    about = 'The keys of a run that differ from their defaults.'
    path.write_text(
      config_files.source(config_files.non_default_keys(keys), about)
    )
    argv = [f'--config={path}', f'--workdir={os.fspath(workdir)}']
    _launch([*argv, '--overwrite'] if overwrite else argv, say)
  return Run(pathlib.Path(workdir))


def _checked(config: Given, changes: Mapping | None) -> RunConfig:
  if isinstance(config, RunConfig) and not changes:
    return config
  return run_config.build(config_files.given(config, changes))


def _launch(argv: list[str], say: Callable[[str], object]) -> None:
  """Runs `diloco local` to its end; with this call it ends, too."""
  last = collections.deque[str](maxlen=LINES_KEPT)
  with subprocess.Popen(
    [sys.executable, '-m', 'diloco', 'local', *argv],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors='replace',
    # `python -m` finds this package where this process has found it.
    env=os.environ | {'PYTHONPATH': _path()},
  ) as launcher:
    try:
      for line in launcher.stdout:
        last.append(line.rstrip('\n'))
        say(last[-1])
    except BaseException:
      # Once: at the second one it would not wait for its processes.
      launcher.send_signal(signal.SIGTERM)
      launcher.wait()
      raise
  if launcher.returncode == EXIT_CONFIG:
    problems = [x for x in last if x.startswith('error: ')]
    raise ConfigError([x.removeprefix('error: ') for x in problems] or [*last])
  if launcher.returncode:
    lines = '\n'.join(last)
    raise RuntimeError(
      f'the launcher ended with code {launcher.returncode}:\n{lines}'
    )


def _path() -> str:
  own = str(own_code.PACKAGE.parent)
  return os.pathsep.join(filter(None, [own, os.environ.get('PYTHONPATH', '')]))
