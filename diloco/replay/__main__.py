# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a run's Θ from its event logs and compares: python -m diloco.replay
…

  python -m diloco.replay RUN

Exit code 0: every round has the CRC of the run, and the parameters are the
same bytes, where the run has come to its end. 1: something differs; the first
round that does is named. 78: the folder can't be replayed; says why.
"""

import os
import pathlib
import sys

import jax

from diloco.checkpoint.parameters import read_parameters
from diloco.config import config_files, flags, run_config
from diloco.metrics.files import MalformedFile
from diloco.metrics.run_progress import ProgressLine, counter
from diloco.metrics.workdir import Workdir
from diloco.models.kinds import GIVEN
from diloco.replay.replay import (
  NotReplayable,
  Replay,
  ReplayBackend,
  Replayed,
  ReplayPlan,
  make_plan,
)
from diloco.run import environment, logs
from diloco.run.event_log import EventLogs, read_tapes
from diloco.run.spec import make_run_spec

# What a folder that can't be replayed raises.
UNREADABLE = (NotReplayable, MalformedFile, ValueError, FileNotFoundError)


def replay(workdir: Workdir) -> Replayed:
  """Replays a run; this process, which has no devices yet, becomes like it.

  Raises:
    ConfigError: the run's configuration can't be used here.
    NotReplayable: the event logs lack something.
    MalformedFile: a file can't be read.
    ValueError: the model can't be made.
    FileNotFoundError: a file, or the text, is missing.
  """
  config = run_config.build(config_files.read(str(workdir.config)))
  if config.model.kind == GIVEN:
    raise NotReplayable(
      "model.kind='given': its steps were made by a loop of the user's own, "
      'which alone can make them again'
    )
  tapes = read_tapes(workdir)
  plan = make_plan(tapes)
  _check_replayable(plan)
  _become_like(plan, config, workdir)
  run_spec = make_run_spec(config)
  _say_what_is_unlike(tapes, plan, config)
  backend = ReplayBackend(run_spec)
  with ProgressLine() as line:
    line.say('the first steps are made')
    tell = counter(line.say, 'inner steps')
    return Replay(
      run_spec, plan, backend, lambda rounds, steps: tell(steps, plan.steps)
    ).run()


def _check_replayable(plan: ReplayPlan):
  """Rejects learners of several hosts, whose sums' order can't be repeated, and
  those that read other windows.
  """
  for (learner, _), script in sorted(plan.scripts.items()):
    hosts = script.begin.machine.hosts
    if not script.begin.machine.batch:
      raise NotReplayable(
        f'learner {learner} is of a version that dealt the rows of the text '
        'otherwise: replay it with 0.1.0'
      )
    if hosts > 1:
      raise NotReplayable(
        f'learner {learner} had {hosts} processes; only learners of one can '
        'be made again'
      )


def _become_like(
  plan: ReplayPlan, config: run_config.RunConfig, workdir: Workdir
):
  """Sets threads, XLA flags and the compilation cache to those of the run.

  It must precede the first use of a device, when jax reads them.
  """
  machines = [script.begin.machine for script in plan.scripts.values()]
  if machines:
    os.environ |= environment.environment_like(machines[0])
    if machines[0].platform == 'cpu':
      jax.config.update('jax_platforms', 'cpu')
      devices = max(m.fsdp * m.expert * m.context * m.tensor for m in machines)
      jax.config.update('jax_num_cpu_devices', devices)
  if config.run.compilation_cache and workdir.compiled.is_dir():
    jax.config.update('jax_compilation_cache_dir', str(workdir.compiled))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def _say_what_is_unlike(
  tapes: EventLogs, plan: ReplayPlan, config: run_config.RunConfig
):
  for path in tapes.torn:
    _say(f'{path}: the last line is torn, left out')
  unlike = {
    f'learner {learner}: {difference}'
    for (learner, _), script in plan.scripts.items()
    for there in [script.begin.machine]
    for difference in environment.differences(
      environment.describe(environment.config_like(config, there), os.environ),
      there,
    )
  }
  for words in sorted(unlike):
    _say(f'bytes may differ: {words}')
  _say(
    f'{len(plan.merges)} rounds, {plan.steps} inner steps of '
    f'{len(plan.scripts)} processes'
  )


def _say(line: str):
  print(line, file=sys.stderr)


def compare(replayed: Replayed, workdir: Workdir) -> int:
  """Prints the outcome of a replay; returns the exit code."""
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
  ours = {p: (x.shape, x.tobytes()) for p, x in replayed.parameters.items()}
  written = read_parameters(workdir.parameters)
  theirs = {path: (x.shape, x.tobytes()) for path, x in written.items()}
  if unlike := {path for path, _ in ours.items() ^ theirs.items()}:
    print(f'DIFFERS: {workdir.parameters}: {", ".join(sorted(unlike))}')
    return 1
  print(f'{workdir.parameters}: the same bytes')
  return 0


def main(argv) -> int:
  """Replays, compares, says what came of it."""
  logs.keep_ours()
  workdir = Workdir(pathlib.Path(argv[1]))
  with flags.refusing(*UNREADABLE):
    return compare(replay(workdir), workdir)


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  flags.run_of_runs(main)
