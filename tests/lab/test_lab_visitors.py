# SPDX-License-Identifier: Apache-2.0
"""Learners that are there for a while only."""

import pytest

from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.lab.failure_schedule import TransientLearners
from diloco.lab.outputs import LabObserver
from diloco.lab.run import train
from diloco.run.spec import make_run_spec
from experiments import common


class Events(LabObserver):
  """Records the events of each process."""

  def __init__(self):
    self.seen = []

  def happened(self, at_s, process, event, detail=''):
    self.seen.append((process, event))


def _config(begin=0.0, end=0.5, **lab):
  config = common.quicktest(common.base())
  config.model.update(kind='bowl', layers=2)  # Compiled at once.
  config.protocol.update(total_steps=24, learners=3)
  config.lab.update(visitors=1, visit_from=begin, visit_until=end, **lab)
  return run_config.build(config)


@pytest.mark.parametrize(
  ('begin', 'end', 'events'),
  [(0.0, 0.5, ['started', 'stopped']), (0.5, 1.0, ['started'])],
)
def test_a_visitor_is_there_for_a_half(begin, end, events):
  seen = Events()
  trained = train(make_run_spec(_config(begin, end)), observer=seen)
  assert [e for who, e in seen.seen if who == 'learner-2'] == events
  assert trained.points[-1].step == 24
  counts = trained.tally.learners
  assert 9 <= counts[2].steps <= 15 < counts[0].steps
  assert counts[2].merged > 0
  assert trained.goodput > 0.9


def test_the_time_in_which_learners_should_be_there():
  visits = TransientLearners(_config())
  assert visits.learner_s(10.0) == 2 * 10.0
  visits.begin(4.0)
  assert visits.learner_s(10.0) == 2 * 10.0 + 6.0
  visits.end(7.0)
  assert visits.learner_s(10.0) == 2 * 10.0 + 3.0
  assert visits.expects(2, 5.0)
  assert not visits.expects(2, 7.0)
  assert visits.expects(1, 7.0)


@pytest.mark.parametrize(
  ('lab', 'message'),
  [
    ({'system': 'elastic'}, "lab.visitors=1: must be 0, system='elastic'"),
    ({'visitors': 3}, 'lab.visitors=3: must be less than protocol.learners=3'),
    ({'visit_until': 0.0}, 'lab.visit_until=0.0: must be more than'),
    ({'visit_from': -0.5}, 'lab.visit_from=-0.5: must be in'),
  ],
)
def test_what_can_not_be_is_refused(lab, message):
  with pytest.raises(ConfigError, match=message):
    config = common.quicktest(common.base())
    config.protocol.learners = 3
    config.lab.update({'visitors': 1, 'visit_until': 0.5} | lab)
    run_config.build(config)
