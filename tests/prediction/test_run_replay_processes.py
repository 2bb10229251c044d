# SPDX-License-Identifier: Apache-2.0
"""Real processes are killed; the simulator, told when, predicts goodput."""

import pathlib

import pytest

from diloco.config import run_config
from diloco.metrics.workdir import Workdir, learner_name
from diloco.prediction import recorded, report
from experiments import faults
from launch.chaos.stage import LiveRun
from tests.commands import output

pytestmark = pytest.mark.alone

REPOSITORY = pathlib.Path(__file__).parents[2]
LEARNERS = 3
START_S = 240.0  # Until every learner is merged, on a busy machine.
CALM_S = 4.0
POINTS = 5.0  # Done when 5 of the issue.
STEP_FLOOR_S = 0.05
RESTART_DELAY_S = 0.5


def settings():
  """Returns the configuration, and the flags that give the same."""
  config = faults.get_config(f'learners={LEARNERS},steps=100000')
  config.run.update(step_floor_s=STEP_FLOOR_S, restart_delay_s=RESTART_DELAY_S)
  path = REPOSITORY / 'experiments' / 'faults.py'
  flags = [
    f'--config={path}:learners={LEARNERS},steps=100000',
    f'--config.run.step_floor_s={STEP_FLOOR_S}',
    f'--config.run.restart_delay_s={RESTART_DELAY_S}',
  ]
  return run_config.build(config), flags


def kill_and_wait(run: LiveRun, learner: int):
  """Kills a learner and waits until its next process is merged."""
  name = learner_name(learner)
  run.supervisor.kill(name, 'by the test')
  starts = sum(e.process == name and e.event == 'started' for e in run.events)

  def is_back() -> bool:
    started = [
      e.time_s for e in run.events if e.process == name and e.event == 'started'
    ]
    return len(started) > starts and bool(run.merges(started[-1], learner))

  run.until(is_back, START_S, f'{name} is merged again')


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_chaos_run_and_its_simulation_agree_on_goodput(tmp_path):
  """They agree over two kills, whatever else the machine does meanwhile.

  So what start-ups took is known: this is about what follows from them.
  """
  root = tmp_path / 'run'
  root.mkdir()
  config, flags = settings()
  with LiveRun(config, flags, Workdir(root)) as run:
    run.until(lambda: run.all_merge(0.0), START_S, 'everybody is merged')
    run.spend(CALM_S)
    kill_and_wait(run, 1)
    kill_and_wait(run, 2)
    run.spend(CALM_S)
  kills = recorded.kills(recorded.read(root))
  assert [fault.target for fault in kills] == ['learner-1', 'learner-2']
  measured, predicted = goodputs(root)
  assert 30 < measured < 97, 'nothing was to be seen'
  assert abs(predicted - measured) <= POINTS, (measured, predicted)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize('seed', [1, 2, 3])
def test_a_soak_and_its_simulation_agree_on_goodput(tmp_path, seed):
  """Eight kills of all roles, two at once, some in a start-up."""
  root = tmp_path / 'run'
  soak = '-m', 'tests.chaos.soak', '--kills=8', f'--seed={seed}'
  output(*soak, f'--workdir={root}')
  measured, predicted = goodputs(root)
  assert abs(predicted - measured) <= POINTS, (measured, predicted)


def goodputs(root: pathlib.Path) -> tuple[float, float]:
  """Returns measured and predicted %."""
  page = report.report(root, 8, lambda text: None)
  agreement = next(part for part in page.parts if part.name == 'agreement')
  _, measured, predicted, *_ = next(
    row for row in agreement.rows if row[0] == 'goodput, %'
  )
  return measured, predicted
