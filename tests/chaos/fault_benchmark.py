# SPDX-License-Identifier: Apache-2.0
"""Measures what the others notice when one process is killed or stopped.

  python -m tests.chaos.fault_benchmark [--repeats=3] [--seconds=8]
  [--out=x.json]
    [--data_plane=grpc] [--workdir=DIR] [--config.a.b=c ...]

Real processes, real signals, one run: nothing happens; a learner is killed;
the syncer is killed; a learner is stopped for 8 s; and again. Then one table,
beside what it should be. The configuration is `experiments/faults.py`.
Exit code 0: it was measured, whatever the figures; 1: it could not be; 78: it
can't run as configured; 130, 143: Ctrl-C, SIGTERM.
"""

import collections
import dataclasses
import functools
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable, Sequence

import rich.console
from absl import flags as absl_flags

from diloco.config import flags
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics import files
from diloco.metrics.workdir import Workdir
from diloco.transport import planes
from launch.chaos.live_run import LiveRun, Overdue, RunFailed
from launch.local import occupy
from launch.session import Interrupted, signals
from launch.supervisor import ProcessEvent
from tests.chaos import fault_scenarios, fault_table
from tests.chaos.command_line import parse_with_default
from tests.chaos.fault_scenarios import Measured

CONFIG = 'faults.py:steps=100000000'  # The benchmark ends the run.
WARM_UP_S = 5.0  # After every learner has been merged.
WIDTH_MIN = 132  # Of the table; wider than most terminals' default.


def measure(
  config: RunConfig,
  arguments: Sequence[str],
  workdir: Workdir,
  repeats: int,
  seconds: float,
  say: Callable[[str], None],
  received: list[int],
) -> dict[str, list[Measured]]:
  """Runs all scenarios `repeats` times; scenario -> figures of each.

  Args:
    config: of the run.
    arguments: the flags that give a process this configuration.
    workdir: occupied, empty.
    repeats: a different learner is hit each time.
    seconds: without a fault, and before and after each.
    say: takes a line for the user.
    received: signals that ask to stop.

  Raises:
    Overdue: something that must come did not.
    RunFailed: the processes can't go on.
    Interrupted: by a signal.
  """

  def look():
    if received:
      raise Interrupted(received[0])

  def announce(event: ProcessEvent):
    say(f'  {event.process} ({event.pid}) {event.event}: {event.detail}')

  measured = collections.defaultdict(list)
  with LiveRun(
    config, arguments, workdir, fault_scenarios.AWAY_S, announce, look
  ) as run:
    run.until(
      lambda: run.all_merge(0.0),
      fault_scenarios.READY_S,
      'every learner is merged',
    )
    run.spend(WARM_UP_S)
    for i in range(repeats):
      victim = i % config.protocol.learners
      given = {
        fault_scenarios.NO_FAULT: fault_scenarios.no_fault,
        fault_scenarios.LEARNER_KILLED: functools.partial(
          fault_scenarios.learner_killed, victim=victim
        ),
        fault_scenarios.SYNCER_KILLED: fault_scenarios.syncer_killed,
        fault_scenarios.LEARNER_STOPPED: functools.partial(
          fault_scenarios.learner_stopped, victim=victim
        ),
      }
      for name, scenario in given.items():
        say(f'repetition {i + 1} of {repeats}: {name}')
        measured[name].append(scenario(run, seconds=seconds))
  return dict(measured)


def define_flags() -> None:
  """The flags of this main."""
  flags.define_flags()
  absl_flags.DEFINE_integer(
    'repeats', 3, 'Repetitions of all faults.', lower_bound=1
  )
  absl_flags.DEFINE_float(
    'seconds', 8.0, 'Without a fault, before and after each.', lower_bound=1.0
  )
  absl_flags.DEFINE_enum(
    'data_plane', None, planes.CONFIGURABLE, "In place of the config's."
  )
  absl_flags.DEFINE_string(
    'workdir', None, 'Folder of the run; default: a temporary one.'
  )
  absl_flags.DEFINE_bool(
    'overwrite', False, 'Remove the run that the workdir holds.'
  )
  absl_flags.DEFINE_string('out', None, 'JSON file for all figures.')


def main(argv) -> int:
  config, arguments = flags.load(), flags.arguments()
  given = absl_flags.FLAGS
  root = given.workdir or tempfile.mkdtemp(prefix='faults-')
  if len(argv) > 1:
    raise ConfigError([f'{argv[1]}: unexpected argument'])
  if config.run.log_every_steps != 1:
    raise ConfigError(
      [
        f'run.log_every_steps={config.run.log_every_steps}: must be 1, every '
        'step is looked at'
      ]
    )
  if given.data_plane:
    transport = dataclasses.replace(
      config.transport, data_plane=given.data_plane
    )
    config = dataclasses.replace(config, transport=transport)
    arguments.append(f'--config.transport.data_plane={given.data_plane}')
  workdir, lock, _ = occupy(pathlib.Path(root), given.overwrite)
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=WIDTH_MIN)

  def say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

  say(f'in {workdir.root}')
  try:
    with lock, signals() as received:
      measured = measure(
        config, arguments, workdir, given.repeats, given.seconds, say, received
      )
  except Interrupted as stopped:
    say(f'{stopped}; no process is left')
    return 128 + stopped.number
  except (Overdue, RunFailed) as error:
    say(f'failed: {error}; the logs are in {workdir.log("*").parent}')
    return 1
  learners = config.protocol.learners
  title = (
    f'{config.name}: 1 syncer, {learners} learners, steps of '
    f'{config.run.step_floor_s * 1000:.0f} ms, '
    f'{config.transport.data_plane}, {os.cpu_count()} CPU cores'
  )
  console.print(fault_table.show(title, learners, measured))
  if given.out:
    files.write_json(
      pathlib.Path(given.out),
      {
        'title': title,
        'python': platform.python_version(),
        'config': dataclasses.asdict(config),
        'repetitions': measured,
        'figures': fault_table.summary(learners, measured),
      },
    )
  return 0


if __name__ == '__main__':
  define_flags()
  flags.run(main, lambda argv: parse_with_default(argv, CONFIG))
