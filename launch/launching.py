# SPDX-License-Identifier: Apache-2.0
"""Carries out one command of launch.main on the engine that was asked for."""

import sys
from collections.abc import Callable

from absl import flags as absl_flags

from diloco.config import RunConfig
from launch import commands, engines, launch_flags, rehearsal
from launch.launch import Launch
from launch.launch_flags import QUEUED_RESOURCES

START = 'start'
ADD = 'add-learner'
REMOVE = 'remove-learner'
WATCH = 'watch'
COMMANDS = (START, ADD, REMOVE, WATCH)

Engine = engines.Gke | engines.Slurm | engines.QueuedResources


def perform(command: str, config: RunConfig, say: Callable[[str], None]) -> int:
  """The exit code of launch.main.

  Raises:
    ConfigError: the launch can not be.
    CommandFailed: a program of the engine is missing, or failed.
  """
  given = absl_flags.FLAGS
  whole = launch_flags.read_launch(config)
  for line in left_out(config):
    print(f'note: {line}', file=sys.stderr)
  if given.dry_run and given.to == QUEUED_RESOURCES:
    return _rehearse(command, whole, say)
  engine = _engine(say)
  match command:
    case 'start':
      return engine.start(whole)
    case 'add-learner':
      return engine.add(whole, given.learner)
    case 'remove-learner':
      return engine.remove(whole, given.learner)
    case 'watch':
      return engine.watch(whole)
    case _:
      raise ValueError(f'no command: {command!r}')


def left_out(config: RunConfig) -> list[str]:
  """What the configuration asks for, and only a local run has."""
  lines = []
  if config.faults:
    lines.append('config.faults is for --to=local; nobody is killed here')
  if config.run.eval_every_rounds:
    lines.append(
      'config.run.eval_every_rounds: start python -m diloco.evaluator beside '
      'the syncer, with its workdir'
    )
  return lines


def _engine(say: Callable[[str], None]) -> Engine:
  given = absl_flags.FLAGS
  act = rehearsal.shown(say) if given.dry_run else _loudly(say)
  match given.to:
    case launch_flags.GKE:
      return engines.Gke(
        act,
        given.namespace,
        given.storage_gib,
        given.storage_class,
        given.shared_claim,
      )
    case launch_flags.SLURM:
      return engines.Slurm(act, tuple(given.sbatch), not given.dry_run)
    case launch_flags.QUEUED_RESOURCES:
      return engines.QueuedResources(
        commands.run, launch_flags.read_cloud(), say
      )
    case _:
      raise ValueError(f'no engine: {given.to!r}')


def _loudly(say: Callable[[str], None]) -> engines.Act:
  """Runs a command and passes on what it says."""

  def act(argv, text):
    output = commands.run(argv, text)
    if output:
      say(output.rstrip('\n'))
    return output

  return act


def _rehearse(command: str, whole: Launch, say: Callable[[str], None]) -> int:
  """On TPU VMs one step stands on what the one before it told."""
  cloud, learner = launch_flags.read_cloud(), absl_flags.FLAGS.learner
  if command == ADD:
    rehearsal.queued_learner(whole, learner, cloud, say)
  elif command == REMOVE:
    rehearsal.queued_removal(whole, learner, cloud, say)
  else:
    rehearsal.queued_resources(whole, cloud, say, with_roles=command == START)
  return 0
