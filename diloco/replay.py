# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a run's Θ from its tapes and compares: python -m diloco.replay …

  python -m diloco.replay --workdir=DIR

Exit code 0: every round has the CRC of the run, and the parameters are the
same bytes, where the run has come to its end. 1: something differs; the first
round that does is named. 78: the folder can't be replayed; says why.
"""

import json
import os
import pathlib
import sys

import jax
import numpy as np
from absl import flags

from diloco import config as configs
from diloco import flags as config_flags
from diloco.checkpoint.parameters import read_parameters
from diloco.config_values import ConfigError
from diloco.metrics.files import Malformed
from diloco.metrics.workdir import Workdir
from diloco.runtime import logs, machine
from diloco.runtime.blueprint import make_blueprint
from diloco.runtime.replay_plan import NotReplayable, Plan, make_plan
from diloco.runtime.replaying import Replay, Replayed
from diloco.runtime.tape_reading import Tapes, read_tapes

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')


def main(_) -> int:
  """Replays, compares, says what came of it."""
  logs.keep_ours()
  workdir = Workdir(pathlib.Path(_WORKDIR.value))
  try:
    config = _read_config(workdir)
    tapes = read_tapes(workdir)
    plan = make_plan(tapes)
    _become_like(plan, config, workdir)
    blueprint = make_blueprint(config)
    configs.check_devices(config, jax.local_device_count())
    _say_what_is_unlike(plan, tapes, config)
    replayed = Replay(blueprint, plan, tell=_tell(plan)).run()
    return _compare(replayed, workdir)
  except ConfigError as error:
    config_flags.exit_config(error)
  except (NotReplayable, Malformed, ValueError, FileNotFoundError) as error:
    config_flags.exit_config(ConfigError([str(error)]))


def _read_config(workdir: Workdir) -> configs.RunConfig:
  try:
    fields = json.loads(workdir.config.read_text())
  except ValueError as error:
    raise Malformed(f'{workdir.config}: {error}') from None
  return configs.restore(fields)


def _become_like(plan: Plan, config: configs.RunConfig, workdir: Workdir):
  """Threads, XLA's flags and compiled programs of the run.

  Before jax is asked for a device: that is when it looks at them.
  """
  machines = [script.begin.machine for script in plan.scripts.values()]
  if machines:
    os.environ |= machine.environment_like(machines[0])
    if machines[0].platform == 'cpu':
      jax.config.update('jax_platforms', 'cpu')
  if config.run.compilation_cache and workdir.compiled.is_dir():
    jax.config.update('jax_compilation_cache_dir', str(workdir.compiled))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def _say_what_is_unlike(plan: Plan, tapes: Tapes, config: configs.RunConfig):
  here = machine.describe(config.mesh, os.environ)
  for path in tapes.torn:
    print(f'{path}: the last line is torn, left out', file=sys.stderr)
  unlike = {
    f'learner {learner}: {difference}'
    for (learner, _), script in plan.scripts.items()
    for difference in machine.differences(here, script.begin.machine)
  }
  for words in sorted(unlike):
    print(f'bytes may differ: {words}', file=sys.stderr)
  print(
    f'{len(plan.merges)} rounds, {plan.steps} inner steps of '
    f'{len(plan.scripts)} processes',
    file=sys.stderr,
  )


def _tell(plan: Plan):
  """A line that is written over on a terminal, ten lines elsewhere."""
  every = 1 if sys.stderr.isatty() else max(1, len(plan.merges) // 10)
  end = '\r' if sys.stderr.isatty() else '\n'

  def tell(rounds: int, steps: int):
    if rounds % every == 0:
      print(
        f'round {rounds}/{len(plan.merges)}, step {steps}/{plan.steps}',
        end=end,
        file=sys.stderr,
        flush=True,
      )

  return tell


def _compare(replayed: Replayed, workdir: Workdir) -> int:
  done = (
    f'{replayed.rounds} rounds, {replayed.steps} inner steps of '
    f'{replayed.processes} processes'
  )
  if replayed.difference is not None:
    print(f'DIFFERS after {done}:\n{replayed.difference}')
    return 1
  print(f'{done}: every round has the CRC of the run')
  if not replayed.ended:
    print('the run has not come to its end, there are no parameters to compare')
    return 0
  written = read_parameters(workdir.parameters)
  unlike = _unlike(replayed.parameters, written)
  if unlike:
    print(f'DIFFERS: {workdir.parameters}: {", ".join(unlike)}')
    return 1
  print(f'{workdir.parameters}: the same bytes')
  return 0


def _unlike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]):
  """Paths of the parameters that have not the same bytes."""
  return [
    path
    for path in sorted(ours.keys() | theirs.keys())
    if path not in ours
    or path not in theirs
    or ours[path].shape != theirs[path].shape
    or ours[path].tobytes() != theirs[path].tobytes()
  ]


if __name__ == '__main__':
  flags.mark_flag_as_required('workdir')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  config_flags.run_without_config(main)
