# SPDX-License-Identifier: Apache-2.0
"""Runs in one process: the same bits again, and equalities with plain steps."""

import collections
import functools
import types

import numpy as np
import pytest

from diloco.config import run_config
from diloco.lab.outputs import LabObserver
from diloco.lab.process_arrays import UpFeedback
from diloco.lab.run import train
from diloco.learner.programs import LearnerPrograms
from diloco.metrics import names
from diloco.numerics.schedule import make_schedule
from diloco.run import payload_parts
from diloco.run.spec import make_run_spec
from experiments import common


@functools.cache  # Most of a run is compilation.
def _train(**changes):
  """A small run with keys such as outer__lr=1.0 changed."""
  return _train_anew(**changes)


def _train_anew(observer=None, **changes):
  config = common.quicktest(common.base())
  config.model.update(layers=1)
  config.protocol.update(total_steps=12)
  for key, value in changes.items():
    section, _, name = key.rpartition('__')
    (config[section] if section else config)[name] = value
  run_spec = make_run_spec(run_config.build(config))
  return train(run_spec, observer=observer)


def _same(one, other) -> bool:
  return all(
    np.array_equal(x.view(np.uint32), other.parameters[path].view(np.uint32))
    for path, x in one.parameters.items()
  )


BOWL = {'model__kind': 'bowl', 'model__layers': 2}  # Compiled at once.
DEADLY = {
  'lab__mtbf_steps': 5.0,
  'lab__away_steps': 2.0,
  'checkpoint__learner_every_steps': 0,
}


def test_the_same_seed_gives_the_same_bits_also_with_deaths():
  one, again = _train(**DEADLY), _train_anew(**DEADLY)
  assert _same(one, again)
  assert one.points == again.points
  assert one.goodput < 0.95, 'nobody died'


class _Rates(LabObserver):
  """Keeps the rates that are recorded, and those of the steps they are of.

  A step that its process died in was taken, and is not recorded.

  Args:
    taken: first row and rate of the steps so far, by learner.
  """

  def __init__(self, taken):
    self.of = collections.defaultdict(list)
    self.steps = collections.defaultdict(list)
    self.incarnations = set()
    self._taken = taken

  def stepped(self, learner, step, scalars):
    self.of[learner].append(scalars[names.LEARNING_RATE])
    self.steps[learner].append(self._taken[learner][-1])
    self.incarnations.add((learner, scalars[names.INCARNATION]))


@pytest.mark.parametrize('progress', ['own', 'global'])
def test_who_returns_goes_on_with_its_schedule(progress, monkeypatch):
  """A learner's own steps before its death count for its schedule, too.

  What is recorded is the rate of the step.
  """
  taken = collections.defaultdict(list)
  step = LearnerPrograms.step

  def recorded_step(programs, params, state, batch, lr, draw):
    taken[draw[0]].append((draw[1], float(lr)))
    return step(programs, params, state, batch, lr, draw)

  monkeypatch.setattr(LearnerPrograms, 'step', recorded_step)
  rates = _Rates(taken)
  changes = {
    **BOWL,
    **DEADLY,
    'inner__progress': progress,
    'lab__slow_learners': 1,
  }
  trained = _train_anew(
    observer=rates, protocol__total_steps=40, lab__slow_gap=0.5, **changes
  )
  assert trained.deaths and len(rates.incarnations) > 2
  rate_at = make_schedule('cosine', 3e-3, 4, 40, 0.1)
  for learner, steps in taken.items():
    assert rates.of[learner] == [rate for _, rate in rates.steps[learner]]
    by_own = [rate_at(rows // 4) for rows, _ in steps]
    assert ([rate for _, rate in steps] == by_own) == (progress == 'own')


def test_it_learns_and_tells_where_it_stood():
  trained = _train(
    protocol__total_steps=60, lab__eval_every_steps=20, inner__lr=3e-3
  )
  assert [point.step for point in trained.points[:-1]] == [20, 40]
  losses = [point.loss for point in trained.points]
  assert losses[-1] < losses[0] < 5.6
  assert trained.participation > 0.9
  assert trained.points[-1].step == 60
  assert 2 * 60 - 4 <= trained.steps <= 2 * 60  # t is the faster one's.


def test_data_parallel_of_one_learner_is_that_learner_alone():
  alone = {**BOWL, 'protocol__learners': 1, 'lab__system': 'alone'}
  one = _train(**alone | {'lab__system': 'data_parallel'})
  assert _same(one, _train(**alone))


@pytest.mark.parametrize('start', [0.0, 0.5])
def test_one_learner_without_codec_or_outer_momentum_is_alone(start):
  """τ = 0, f32, outer lr 1: Θ is θ, to rounding.

  So it is where the first half is data-parallel: θ, moments, rows and the
  schedule go on.
  """
  plain = {**BOWL, 'inner__progress': 'own', 'inner__schedule': 'cosine'}
  decoupled = _train(
    protocol__learners=1,
    protocol__quorum=1,
    protocol__overlap_steps=0,
    protocol__fragments=1,
    codec__up='f32',
    codec__down='f32',
    outer__lr=1.0,
    outer__momentum=0.0,
    outer__anneal_fraction=0.0,
    lab__start_fraction=start,
    **plain,
  )
  alone = _train(protocol__learners=1, lab__system='alone', **plain)
  for path, x in alone.parameters.items():
    np.testing.assert_allclose(
      decoupled.parameters[path], x, rtol=2e-3, atol=2e-5, err_msg=path
    )


def test_learners_of_a_data_parallel_start_have_its_tokens():
  half, whole = (_train(**BOWL, lab__start_fraction=x) for x in (0.5, 0.0))
  assert half.points[-1].step == whole.points[-1].step == 12
  made = sum(count.steps for count in half.tally.learners.values())
  assert 2 * 6 - 4 <= made <= 2 * 6
  ahead = 2 * 6 * 4 * 32  # Tokens of six steps of two learners.
  assert half.points[-1].tokens == ahead + made * 4 * 32
  assert ahead < half.merged_tokens <= half.points[-1].tokens


@pytest.mark.parametrize('system', ['data_parallel', 'decoupled'])
def test_the_average_is_of_the_last_steps(system):
  """That of one step is the end itself, that of all is another one."""
  run = {**BOWL, 'lab__system': system}
  of_one, of_all = (
    _train(**run, lab__average_fraction=x).points[-1] for x in (1 / 12, 1.0)
  )
  assert of_one.average_loss == of_one.loss == of_all.loss
  assert of_all.average_loss > of_all.loss
  assert set(of_all.halves) >= {'loss', 'average_loss'}
  assert np.mean(of_all.halves['loss']) == pytest.approx(of_all.loss, rel=1e-6)
  assert np.isnan(_train(**run).points[-1].average_loss)


def test_the_bias_of_a_mixture_of_experts_is_averaged():
  mixture = {'model__kind': 'moe', 'model__router_bias_rate': 2.0**-6}
  trained = _train(**mixture)
  # f32 both ways would be whole steps; int4 rounds them, once each way.
  bias = trained.parameters['layers/mlp/router_bias']
  assert 0 < np.abs(bias).max() < 12 * 2.0**-6


def test_what_a_merged_offer_did_not_send_comes_with_the_next():
  """Of one that is not merged nothing is kept: the next has its progress."""
  config = common.quicktest(common.base())
  config.model.update(kind='bowl', layers=2)
  config.protocol.update(fragments=1)
  config.codec.up = 'int2'
  run_spec = make_run_spec(run_config.build(config))
  (pieces,) = run_spec.layout.fragments
  feedback, rng = UpFeedback(run_spec), np.random.default_rng(0)
  zeros = {x.name: np.zeros(x.shape, np.float32) for x in pieces}
  wanted = {x.name: rng.normal(size=x.shape) for x in pieces}
  given, sum_ = {k: np.float32(x) for k, x in wanted.items()}, dict(zeros)
  for handle in range(1, 41):
    offer = types.SimpleNamespace(fragment=0, handle=handle)
    data = feedback.encode(offer, given, zeros)
    if handle % 2:
      continue
    feedback.merged(0, handle)
    sent, _ = payload_parts.decode(data, pieces, run_spec.up)
    sum_ = {k: sum_[k] + sent[k] for k in sent}
  for name, x in wanted.items():
    # Twenty merged offers are one rounding off, not twenty.
    assert np.abs(sum_[name] / 20 - x).mean() < 0.05
    assert np.abs(sent[name] - x).mean() > 0.2
