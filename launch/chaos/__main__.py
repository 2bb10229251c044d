# SPDX-License-Identifier: Apache-2.0
r"""Runs a syncer and learners under a seeded plan of faults, and judges them.

  python -m launch.chaos --config=experiments/NAME.py --workdir=DIR \
    --seed=0 --minutes=3 --faults_per_hour=240 [--kinds=kill,cut,…] \
    [--twins=0 --twins_faster=1] [--hosts=2,1 --cpu_devices] [--overwrite] \
    [--config.a.b=c …]

Real processes on loopback, whose connections go through a relay, so it needs
no root. The same plan then drives the machines under the simulated clock, and
`--twins=2` trains as many tokens twice without faults. Exit code 0: the verdict
holds; 1: it does not, or the run failed; 78: it can't run as asked; 130, 143:
Ctrl-C, SIGTERM.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import rich.console
from absl import flags as absl_flags

from diloco import faults
from diloco.config import flags
from diloco.config.data_section import missing_paths
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.faults import Fault, RefusedFault
from diloco.metrics import files
from diloco.metrics.run_progress import ProgressLine
from diloco.metrics.workdir import shard_name
from diloco.transport.sockets import is_loopback
from launch import program as launch_program
from launch.chaos import baselines, fault_plan, stage, verdict
from launch.chaos.conductor import ChaosRun, Folder
from launch.chaos.live_run import Overdue, RunFailed
from launch.local import occupy
from launch.program import SYNCER, Processes
from launch.session import Interrupted, signals

KINDS = faults.performed_by(stage.RealStage)
EXAMPLE = 'experiments/tests_tiny.py'
PLANE = 'grpc'  # The other one's connections can't go through a relay.
FOREVER_STEPS = 10**8  # The command ends the run.
WIDTH_MIN = 120
OTHERWISE_MINUTES = 1.5  # Starts, calm before the plan, all back after it.


def define_flags() -> None:
  """The flags of this main."""
  flags.define_flags()
  absl_flags.DEFINE_string('workdir', None, 'Folder of the run.')
  absl_flags.DEFINE_bool(
    'overwrite', False, 'Remove the run that the workdir holds.'
  )
  absl_flags.DEFINE_integer('seed', 0, 'Seed of the plan and of the relay.')
  absl_flags.DEFINE_float('minutes', 3.0, 'Length of the plan.')
  absl_flags.DEFINE_float('faults_per_hour', 240.0, 'Mean rate of faults.')
  absl_flags.DEFINE_list('kinds', [], f'Some of {", ".join(KINDS)}.')
  absl_flags.DEFINE_integer(
    'twins',
    0,
    'Runs without faults to compare the loss with, one after the other.',
    lower_bound=0,
  )
  absl_flags.DEFINE_float(
    'twins_faster',
    1.0,
    'Twins have steps that are so many times shorter: run.step_floor_s.',
    lower_bound=1.0,
  )
  absl_flags.DEFINE_string('hosts', '1', 'Processes of each learner: 2 or 2,1.')
  absl_flags.DEFINE_bool(
    'cpu_devices', False, 'The devices of config.mesh are made of CPU cores.'
  )


def adapted(
  config: RunConfig, twins: int
) -> tuple[RunConfig, list[str], list[str]]:
  """Returns the configuration of a run of faults.

  Returns:
    The configuration, the flags that change it so, and each change in words.
  """
  changes = {
    'transport.data_plane': PLANE,
    'run.log_every_steps': 1,
    'protocol.total_steps': FOREVER_STEPS,
  }
  if twins and not config.run.eval_every_rounds:
    changes['run.eval_every_rounds'] = config.checkpoint.syncer_every_rounds
  arguments, told = [], []
  for key, value in changes.items():
    section, field = key.split('.')
    part = getattr(config, section)
    if getattr(part, field) == value:
      continue
    told.append(f'{key}={value} in place of {getattr(part, field)}')
    arguments.append(f'--config.{key}={value}')
    part = dataclasses.replace(part, **{field: value})
    config = dataclasses.replace(config, **{section: part})
  return config, arguments, told


def read_plan(
  config: RunConfig, learners: Sequence[Processes]
) -> tuple[Fault, ...]:
  """Draws the plan that the flags ask for.

  Raises:
    ConfigError: there is none, or it does not fit.
  """
  given = absl_flags.FLAGS
  problems = []
  for kind in given.kinds:
    try:
      faults.check(stage.RealStage, kind)
    except RefusedFault as error:
      problems.append(f'--kinds={error}')
  if not given.minutes > 0:
    problems.append(f'--minutes={given.minutes:g}: must be above 0')
  if not given.faults_per_hour >= 0:
    problems.append(
      f'--faults_per_hour={given.faults_per_hour:g}: must be at least 0'
    )
  if problems:
    raise ConfigError(problems)
  hosts = tuple(each.hosts for each in learners)
  cast = fault_plan.Cast(
    learners=config.protocol.learners,
    ids_max=len(stage.hosts_of(config)),
    servers=(SYNCER, *map(shard_name, range(1, config.syncer.shards))),
    hosts=hosts,
  )
  shapes = {kind: KINDS[kind] for kind in given.kinds or KINDS}
  if not given.kinds:  # All that this run can have.
    shapes = {k: s for k, s in shapes.items() if fault_plan.can_befall(s, cast)}
  seconds = given.minutes * 60
  try:
    return fault_plan.draw(
      given.seed, seconds, given.faults_per_hour, shapes, cast
    )
  except fault_plan.Unplannable as error:
    raise ConfigError([str(error)]) from None


def _checked(argv, config: RunConfig) -> tuple[Processes, ...]:
  """Returns of what each learner consists; raises `ConfigError`."""
  given = absl_flags.FLAGS
  if len(argv) > 1:
    raise ConfigError([f'{argv[1]}: unexpected argument'])
  if not given.workdir:
    raise ConfigError(['--workdir: is missing, such as runs/chaos'])
  if why := stage.why_not_here():
    raise ConfigError([f'launch.chaos: {why}'])
  if not is_loopback(config.transport.host):
    raise ConfigError(
      [
        f'transport.host={config.transport.host}: a run of faults stays on '
        'loopback, 127.0.0.1'
      ]
    )
  if missing := list(missing_paths(config.data)):
    raise ConfigError(missing)
  return launch_program.on_this_machine(
    config,
    given.hosts,
    given.cpu_devices,
    os.environ.get(launch_program.XLA_FLAGS, ''),
  )


def lasts(minutes: float, twins: int, faster: float) -> str:
  """Returns how long it will take, in words."""
  whole = OTHERWISE_MINUTES + minutes + twins * (1 + minutes / faster)
  without = f', {twins} runs without faults included' if twins else ''
  return f'it takes about {whole:.0f} minutes{without}; Ctrl-C ends it'


def main(argv) -> int:
  given = absl_flags.FLAGS
  asked = flags.load()
  learners = _checked(argv, asked)
  config, more, told = adapted(asked, given.twins)
  plan = read_plan(config, learners)
  root = pathlib.Path(given.workdir)
  workdir, lock, _ = occupy(root, given.overwrite)
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=WIDTH_MIN)

  shown = ProgressLine()

  def say(text: str) -> None:
    shown.end()  # Where both are the same terminal.
    console.print(text, markup=False, highlight=False, soft_wrap=True)

  say(
    f'chaos: seed {given.seed}, {given.minutes:g} minutes, {len(plan)} '
    f'faults, in {workdir.root}'
  )
  say(f'  {lasts(given.minutes, given.twins, given.twins_faster)}')
  for line in (*told, *map(str, plan)):
    say(f'  {line}')
  folder = Folder(workdir)
  folder.root.mkdir(exist_ok=True)
  files.write_json(
    folder.plan,
    {
      'seed': given.seed,
      'minutes': given.minutes,
      'faults_per_hour': given.faults_per_hour,
      'faults': [dataclasses.asdict(fault) for fault in plan],
    },
  )
  try:
    with lock, signals() as received, shown:
      chaos = ChaosRun(
        *(config, [*flags.arguments(), *more], workdir, learners),
        *(say, shown.say, received, given.seed),
      )
      seconds = given.minutes * 60
      chaos.perform(plan, seconds)
      baselines.train(chaos, folder, seconds, given.twins, given.twins_faster)
  except Interrupted as stopped:
    say(f'{stopped}; no process is left')
    return 128 + stopped.number
  except (Overdue, RunFailed) as error:
    say(f'failed: {error}; the logs are in {workdir.log("*").parent}')
    return 1
  return verdict.judge(workdir, console)


if __name__ == '__main__':
  define_flags()
  flags.run(main, lambda argv: flags.parse(argv, example=EXAMPLE))
