# SPDX-License-Identifier: Apache-2.0
"""Opens a run's folder for a replay: tapes, machine and final parameters."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping

import jax
import numpy as np

from diloco.checkpoint.parameters import read_parameters
from diloco.config import run_config
from diloco.metrics.files import MalformedFile
from diloco.metrics.run_progress import ProgressLine, counter
from diloco.metrics.workdir import Workdir
from diloco.replay.replay import Replay, Replayed
from diloco.replay.replay_backends import ReplayBackend
from diloco.replay.replay_plan import NotReplayable, ReplayPlan, make_plan
from diloco.run import environment
from diloco.run.event_log import EventLogs, read_tapes
from diloco.run.spec import RunSpec, make_run_spec

# What a folder that can't be replayed raises.
UNREADABLE = (NotReplayable, MalformedFile, ValueError, FileNotFoundError)


@dataclasses.dataclass(frozen=True)
class Recorded:
  """A run with its tapes, replayed by a process like its own."""

  workdir: Workdir
  run_spec: RunSpec
  tapes: EventLogs
  plan: ReplayPlan


def open_run(workdir: Workdir) -> Recorded:
  """Reads a run; prepares this process, which has no devices yet, to match it.

  Raises:
    ConfigError: the run's configuration can't be used here.
    NotReplayable: the tapes lack something.
    Malformed: a file can't be read.
    ValueError: the model can't be made.
    FileNotFoundError: a file, or the text, is missing.
  """
  config = _read_config(workdir)
  tapes = read_tapes(workdir)
  plan = make_plan(tapes)
  _check_hosts(plan)
  _become_like(plan, config, workdir)
  run_spec = make_run_spec(config)
  run_config.check_devices(config, jax.local_device_count())
  recorded = Recorded(workdir, run_spec, tapes, plan)
  _say_what_is_unlike(recorded)
  return recorded


def _read_config(workdir: Workdir) -> run_config.RunConfig:
  try:
    fields = json.loads(workdir.config.read_text())
  except ValueError as error:
    raise MalformedFile(f'{workdir.config}: {error}') from None
  return run_config.restore(fields)


def _check_hosts(plan: ReplayPlan):
  """Rejects learners of several hosts: their order of sums can't be
  repeated.
  """
  for (learner, _), script in sorted(plan.scripts.items()):
    hosts = script.begin.machine.hosts
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
  if config.run.compilation_cache and workdir.compiled.is_dir():
    jax.config.update('jax_compilation_cache_dir', str(workdir.compiled))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def _say_what_is_unlike(run: Recorded):
  here = environment.describe(run.run_spec.config.mesh, os.environ)
  for path in run.tapes.torn:
    print(f'{path}: the last line is torn, left out', file=sys.stderr)
  unlike = {
    f'learner {learner}: {difference}'
    for (learner, _), script in run.plan.scripts.items()
    for difference in environment.differences(here, script.begin.machine)
  }
  for words in sorted(unlike):
    print(f'bytes may differ: {words}', file=sys.stderr)
  print(
    f'{len(run.plan.merges)} rounds, {run.plan.steps} inner steps of '
    f'{len(run.plan.scripts)} processes',
    file=sys.stderr,
  )


def make_again(run: Recorded, backend: ReplayBackend) -> int:
  """Replays a run and compares the result; returns the exit code."""
  with ProgressLine() as line:
    line.say('the first steps are made')
    said = counter(line.say, 'inner steps')
    replayed = Replay(
      run.run_spec,
      run.plan,
      backend,
      lambda rounds, steps: said(steps, run.plan.steps),
    ).run()
  return _compare(replayed, run.workdir)


def _compare(replayed: Replayed, workdir: Workdir) -> int:
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
  return compare_parameters(replayed.parameters, workdir)


def compare_parameters(
  parameters: Mapping[str, np.ndarray], workdir: Workdir
) -> int:
  """Compares with the run's final Θ; prints the result, returns 0 if equal."""
  written = read_parameters(workdir.parameters)
  unlike = _unlike(parameters, written)
  if unlike:
    print(f'DIFFERS: {workdir.parameters}: {", ".join(unlike)}')
    return 1
  print(f'{workdir.parameters}: the same bytes')
  return 0


def _unlike(
  ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> list[str]:
  """Returns the paths of the parameters whose bytes differ."""
  return [
    path
    for path in sorted(ours.keys() | theirs.keys())
    if path not in ours
    or path not in theirs
    or ours[path].shape != theirs[path].shape
    or ours[path].tobytes() != theirs[path].tobytes()
  ]
