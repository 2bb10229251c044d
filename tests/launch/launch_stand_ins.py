# SPDX-License-Identifier: Apache-2.0
"""The launcher over stand-ins: python launch_stand_ins.py WORKDIR STEPS WHAT.

WHAT: 'good'; 'broken:CODE', the evaluation exits with CODE; 'refused', learner
2 exits with 78; 'stubborn', learner 2 ignores SIGTERM.
"""

import pathlib
import sys

import rich.console

from diloco.config import lab_section, run_config
from diloco.metrics.workdir import Workdir
from experiments import quickstart
from launch import local
from launch.program import Program, Role

HERE = pathlib.Path(__file__).parent
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('deaf', flush=True)
while True: signal.pause()
"""


def main(root, steps, what):
  given = quickstart.get_config()
  given.protocol.total_steps = int(steps)
  given.inner.warmup_steps = 0
  given.run.restart_delay_s = 0.1
  config = run_config.build(given)
  workdir = Workdir(pathlib.Path(root))
  workdir.root.mkdir(parents=True, exist_ok=True)

  def argv(role, *more):
    return (sys.executable, str(HERE / 'stand_in.py'), role, root, steps, *more)

  learners = [Role(f'learner-{i}', argv('learner', str(i))) for i in range(3)]
  evaluate = Role('evaluate', argv('evaluate'))
  if what.startswith('broken:'):
    code = what.partition(':')[2]
    evaluate = Role('evaluate', argv('broken', code))
  if what == 'refused':
    learners[2] = Role('learner-2', argv('broken', '78'))
  if what == 'stubborn':
    learners[2] = Role('learner-2', (sys.executable, '-c', STUBBORN))
  roles = (Role('syncer', argv('syncer'), ends_run=True), *learners)
  planned = lab_section.plan(config.faults, config.protocol.learners)
  console = rich.console.Console(width=100)
  return local.run(
    config, Program(roles, evaluate, ()), workdir, planned, console
  )


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
