# SPDX-License-Identifier: Apache-2.0
r"""Runs a syncer and learners under a seeded plan of faults, and judges them.

  python -m launch.chaos --config=experiments/NAME.py --workdir=DIR \
    --seed=0 --minutes=3 [--faults_per_hour=240] [--kinds=kill,cut,…] \
    [--chips=1200000 --mtbi_days=365 --repair_s=66.3] \
    [--hosts=2,1 --cpu_devices] [--overwrite] [--config.a.b=c …]

Real processes on loopback, whose connections go through a relay, so it needs
no root. With --chips the faults are the interruptions of a fleet of that size,
each of which takes a slice away until it is repaired. The same plan then drives
the machines under the simulated clock. Exit code 0: the verdict holds; 1: it
does not, or the run failed; 78: it can't run as asked; 130, 143: Ctrl-C,
SIGTERM.
"""

import dataclasses
import os
import pathlib
import random
import sys

import rich.console
from absl import flags as absl_flags

from diloco import faults
from diloco.config import flags
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.config.simulation import FailuresConfig
from diloco.faults import RefusedFault
from diloco.fleets import failures
from diloco.metrics import files
from diloco.metrics.run_progress import ProgressLine
from diloco.metrics.workdir import shard_name
from diloco.prediction.recorded import NotPredictable
from diloco.transport.sockets import is_loopback
from launch import preflight, progress
from launch import program as launch_program
from launch.chaos import checks, fault_plan, stage
from launch.chaos.relay import Relay
from launch.chaos.stage import Clocks, LiveRun, Overdue, Performance, RealStage
from launch.local import Interrupted, RunFailed, occupy, signals
from launch.program import SYNCER

KINDS = faults.performed_by(RealStage)
FLEET = FailuresConfig()  # That of the simulations.
OF_FLEET = 'mtbi_days', 'repair_s'  # Flags beside --chips.
EXAMPLE = 'experiments/tests_tiny.py'
# What the run is judged by. The command ends the run.
KEYS = (
  '--config.run.log_every_steps=1',
  f'--config.protocol.total_steps={10**8}',
)
# Links can be hit with this one alone: the other does not go by a proxy.
PLANE, RELAYED = '--config.transport.data_plane', 'grpc'
LINK_VERBS = {'cut', 'impair', 'throttle', 'partition'}
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
  absl_flags.DEFINE_integer(
    'chips',
    None,
    'Of a fleet, whose interruptions are the plan: each takes a slice away.',
    lower_bound=1,
  )
  absl_flags.DEFINE_float(
    'mtbi_days',
    FLEET.mtbi_days,
    'Between two interruptions of one of these chips.',
  )
  absl_flags.DEFINE_float(
    'repair_s', FLEET.repair_s, 'Mean time until a slice of the fleet is back.'
  )
  absl_flags.DEFINE_list('kinds', [], f'Some of {", ".join(KINDS)}.')
  absl_flags.DEFINE_string('hosts', '1', 'Processes of each learner: 2 or 2,1.')
  absl_flags.DEFINE_bool(
    'cpu_devices', False, 'The devices of config.mesh are made of CPU cores.'
  )


def _problems(argv, config: RunConfig):
  values = absl_flags.FLAGS
  if len(argv) > 1:
    yield f'{argv[1]}: unexpected argument'
  if not values.workdir:
    yield '--workdir: is missing, such as runs/chaos'
  if sys.platform != 'linux':
    yield 'launch.chaos: needs Linux: one address of 127/8 for each learner'
  if not is_loopback(config.transport.host):
    yield (
      f'transport.host={config.transport.host}: a run of faults stays on '
      'loopback, 127.0.0.1'
    )
  for kind in values.kinds:
    try:
      faults.check(RealStage, kind)
    except RefusedFault as error:
      yield f'--kinds={error}'
      continue
    if not _is_relayed(config) and _is_of_links(kind):
      yield f'--kinds={kind}: hits a link, which needs {PLANE}={RELAYED}'
  vain, why = OF_FLEET, 'only for'
  if values.chips is not None:
    vain, why = ('kinds', 'faults_per_hour'), 'not for'
  for name in vain:
    if values[name].present:
      yield (
        f'--{name}={values[name].value}: is {why} the failures of a fleet, '
        'which --chips asks for'
      )
  for name in OF_FLEET:
    if not values[name].value > 0:
      yield f'--{name}={values[name].value:g}: must be above 0'
  if not values.minutes > 0:
    yield f'--minutes={values.minutes:g}: must be above 0'
  if not values.faults_per_hour >= 0:
    yield f'--faults_per_hour={values.faults_per_hour:g}: must be at least 0'


def _is_relayed(config: RunConfig) -> bool:
  return config.transport.data_plane == RELAYED


def _is_of_links(kind: str) -> bool:
  """Returns True for what the relay does."""
  return bool(LINK_VERBS & set(KINDS[kind].verbs))


def main(argv) -> int:
  values, config = absl_flags.FLAGS, flags.load()
  if problems := [*_problems(argv, config)]:
    raise ConfigError(problems)
  preflight.check_keeps_own(config)
  preflight.check_data(config)
  learners = launch_program.on_this_machine(
    config,
    values.hosts,
    values.cpu_devices,
    os.environ.get(launch_program.XLA_FLAGS, ''),
  )
  cast = fault_plan.FaultTargets(
    learners=config.protocol.learners,
    ids_max=len(stage.hosts_of(config)),
    servers=(SYNCER, *map(shard_name, range(1, config.syncer.shards))),
    hosts=tuple(role.hosts for role in learners),
    slices=tuple(role.slices for role in learners),
  )
  kinds = {kind: KINDS[kind] for kind in values.kinds}
  if not kinds:  # All that this run can have.
    kinds = {
      kind: shape
      for kind, shape in KINDS.items()
      if fault_plan.can_befall(shape, cast)
      and (_is_relayed(config) or not _is_of_links(kind))
    }
  seconds = values.minutes * 60
  if values.chips is None:
    plan = fault_plan.draw(
      values.seed, seconds, values.faults_per_hour, kinds, cast
    )
  else:
    befalls = failures.draw(
      failures.rate_per_s(values.chips, values.mtbi_days),
      seconds,
      failures.make(FLEET.repair, values.repair_s, FLEET.repair_shape),
      random.Random(values.seed),
    )
    plan = fault_plan.of_fleet(befalls, seconds, KINDS, cast)
  root = pathlib.Path(values.workdir)
  workdir, lock, _ = occupy(root, values.overwrite)
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=WIDTH_MIN)
  shown = ProgressLine()

  def look() -> None:
    if received:
      raise Interrupted(received[0])

  def say(text: str) -> None:
    shown.end()  # Where both are the same terminal.
    progress.say(console, text)

  say(
    f'chaos: seed {values.seed}, {values.minutes:g} minutes, {len(plan)} '
    f'faults, in {workdir.root}; it takes about '
    f'{OTHERWISE_MINUTES + values.minutes:.0f} minutes; Ctrl-C ends it'
  )
  for line in (*KEYS, *plan):
    say(f'  {line}')
  workdir.chaos.mkdir(exist_ok=True)
  planned = {'seed': values.seed, 'faults': [*map(dataclasses.asdict, plan)]}
  files.write_json(workdir.chaos / stage.PLAN, planned)
  try:
    clocks = Clocks(workdir.chaos / 'clocks')
    with (
      lock,
      signals() as received,
      shown,
      Relay(stage.hosts_of(config), values.seed) as relay,
      LiveRun(
        *(config, flags.arguments(), workdir),
        on_poll=look,
        learners=learners,
        connected=lambda role: stage.connected(
          role, config, relay, clocks, _is_relayed(config)
        ),
      ) as run,
    ):
      real = RealStage(run, relay, clocks)
      Performance(run, real, relay, say, shown.say).perform(plan, seconds)
    return checks.judge(workdir, console)
  except Interrupted as stopped:
    say(f'{stopped}; no process is left')
    return 128 + stopped.number
  except (Overdue, RunFailed, NotPredictable) as error:
    say(f'failed: {error}; the logs are in {workdir.log("*").parent}')
    return 1


if __name__ == '__main__':
  define_flags()
  if flags.has_config(sys.argv):  # Else it is refused.
    sys.argv += KEYS  # The last of equal flags counts.
    if not any(word.startswith(PLANE) for word in sys.argv):
      sys.argv.append(f'{PLANE}={RELAYED}')
  flags.run(main, lambda argv: flags.parse(argv, example=EXAMPLE))
