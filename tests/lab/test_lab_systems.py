# SPDX-License-Identifier: Apache-2.0
"""Systems of the lab under the same deaths; faults; where a run ends."""

import itertools
import math
import pathlib
import runpy

import pytest

from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.lab.data_parallel import DataParallelSteps
from diloco.lab.failure_schedule import FailureSchedule
from diloco.lab.run import train
from diloco.metrics import token_ledger
from diloco.numerics.optimizers import OUTER
from diloco.run.spec import make_run_spec
from experiments import common


def _config(**changes):
  config = common.quicktest(common.base())
  config.model.update(kind='bowl', layers=2)  # Compiled at once.
  config.protocol.update(total_steps=12)
  for key, value in changes.items():
    section, _, name = key.rpartition('__')
    (config[section] if section else config)[name] = value
  return run_config.build(config)


def _group(
  elastic: bool, learners=2, pause_s=2.0, **changes
) -> DataParallelSteps:
  """Steps of 1 s, away for 10 s."""
  config = _config(
    protocol__learners=learners,
    lab__jitter=0.0,
    lab__away_steps=10.0,
    **changes,
  )
  return DataParallelSteps(FailureSchedule(config), learners, pause_s, elastic)


def test_an_elastic_group_goes_on_with_fewer_after_a_pause():
  group = _group(elastic=True)
  group.step()
  group.kill(0)  # At 1 s, back at 11 s.
  steps = [group.step() for _ in range(10)]
  # The pause ends at 3 s; at 11 s it is back, and all stand until 13 s.
  assert [s.begin_s for s in steps] == [*range(3, 11), 13.0, 14.0]
  assert [s.members for s in steps] == [(1,)] * 8 + [(0, 1)] * 2


def test_who_waits_stands_until_it_is_back():
  group = _group(elastic=False)
  group.step()
  group.kill(0)
  step = group.step()
  assert (step.begin_s, step.members) == (13.0, (0, 1))


def test_deaths_are_the_same_for_every_system():
  """Their times; which of them cost something is the system's."""
  mortal = {'lab__mtbf_steps': 30.0}
  waiting, elastic = (_group(x, 4, 0.0, **mortal) for x in (False, True))
  for group in (waiting, elastic):
    while group.now_s < 300:
      group.step()
  assert waiting.deaths[0] == elastic.deaths[0]
  drawn = {death[1] for death in elastic.deaths}
  assert sum(death[1] in drawn for death in waiting.deaths) > 3
  useful = [
    sum(map(sum, (s.lengths_s for s in itertools.islice(_steps(x), 100))))
    for x in (_group(x, 4, 0.0, **mortal) for x in (False, True))
  ]
  assert useful[1] <= useful[0]  # Of 100 steps, some with fewer.


def _steps(group):
  while True:
    yield group.step()


@pytest.mark.parametrize(
  ('system', 'text'),
  [
    ('elastic', 'kill syncer at 0.5'),
    ('alone', 'kill learner 1 at 0.5'),
    ('decoupled', 'stop learner 1 at 0.5'),
  ],
)
def test_a_fault_that_can_not_be_is_refused(system, text):
  config = _config(lab__system=system, faults=(text,))
  with pytest.raises(ConfigError, match='faults'):
    train(make_run_spec(config))


def _train(**changes):
  return train(make_run_spec(_config(**changes)))


def test_elastic_trains_as_many_tokens_in_more_steps():
  """The steps at the end come one by one."""
  trained = _train(
    lab__system='elastic',
    lab__away_steps=6.0,
    faults=('kill learner 1 at 0.5',),
  )
  tokens = 12 * 2 * 4 * 32
  assert (trained.points[-1].step, trained.points[-1].tokens) == (12, tokens)
  assert trained.participation < 0.95
  assert trained.goodput < 0.9
  counts = trained.tally.learners
  assert counts[0].steps > counts[1].steps
  assert [m for m, _, _ in trained.deaths] == [1]


def test_the_outer_optimizer_is_a_setting():
  losses = {
    _train(outer__optimizer=name, outer__anneal_fraction=0.0).loss
    for name in OUTER
  }
  assert len(losses) == len(OUTER) and all(map(math.isfinite, losses))


def test_a_run_ends_at_its_last_step_also_with_a_dead_syncer():
  trained = _train(
    protocol__total_steps=20,
    lab__away_steps=2.0,
    faults=('kill learner 0 at 0.2', 'kill syncer at 0.4'),
  )
  assert trained.points[-1].step == 20
  assert trained.merged_tokens <= trained.points[-1].tokens
  assert [m for m, _, _ in trained.deaths] == [0]
  # Also the step that a learner was at when it died.
  done = _config().protocol.fragments * trained.points[-1].tokens
  assert done <= trained.tokens.trained
  assert dict(trained.tokens.lost)[token_ledger.DIED] > 0
  assert trained.unexplained_tokens == 0


BASELINES = runpy.run_path(
  str(pathlib.Path(__file__).parents[2] / 'experiments' / 'baselines.py')
)


@pytest.mark.parametrize('name', ['synchronous', 'streaming'])
def test_diloco_of_one_program_is_a_setting(name):
  changes = {
    key.replace('.', '__'): value
    for key, value in BASELINES['systems']()[name].items()
  }
  if name == 'streaming':
    changes |= {'protocol__fragments': 2, 'protocol__overlap_steps': 1}
  trained = _train(**changes)
  assert trained.points[-1].step == 12
  assert trained.participation == 1.0
