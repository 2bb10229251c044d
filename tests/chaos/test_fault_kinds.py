# SPDX-License-Identifier: Apache-2.0
"""The table of faults: each driver performs a kind, or refuses it by name."""

import inspect

import pytest

from diloco import faults
from diloco.config import lab_section
from diloco.config.sections import ConfigError
from diloco.faults import KINDS, Fault, RefusedFault
from diloco.prediction.twin import SimulatedStage
from diloco.simulator import scenario
from diloco.simulator.swarm import SwarmStage
from launch.chaos.stage import RealStage

pytestmark = pytest.mark.beside

STAGES = (RealStage, SimulatedStage, SwarmStage)
REFUSED = {
  'real processes': {
    'kill_donor',
    'short_notice',
    'partition',
    'lose_disk',
    'outlier',
    'unusable',
  },
  'swarms': {'delay', 'loss', 'slow', 'leave'},
}
REFUSED['simulated processes'] = REFUSED['real processes']
TARGETS = {
  faults.LEARNER: 'learner-0',
  faults.SERVER: 'syncer',
  faults.HOST: 'learner-0.1',
  faults.SLICE: 'learner-0.2',
  faults.NEWCOMER: 'learner-7',
  faults.MEMBER: 'learner-1',
}


class Recorder:
  """Notes which verbs of a stage are called."""

  NAME = 'a recorder'

  def __init__(self):
    self.called = []

  def __getattr__(self, verb):
    if verb not in faults.FaultStage.__dict__:
      raise AttributeError(verb)
    return lambda *arguments: self.called.append((verb, arguments))


@pytest.mark.parametrize('kind', KINDS)
def test_a_kind_calls_the_verbs_that_it_says_as_they_are_defined(kind):
  recorder = Recorder()
  fault = Fault(1, 0.0, kind, TARGETS[KINDS[kind].targets[0]], way='up')
  faults.begin(recorder, fault)
  faults.end(recorder, fault)
  assert {verb for verb, _ in recorder.called} == {*KINDS[kind].verbs}
  for stage in STAGES:
    for verb, arguments in recorder.called:
      if kind in faults.performed_by(stage):
        inspect.signature(getattr(stage, verb)).bind(None, *arguments)


@pytest.mark.parametrize('stage', STAGES)
def test_a_stage_performs_a_kind_or_refuses_it_by_name(stage):
  for kind in KINDS:
    if kind in REFUSED[stage.NAME]:
      with pytest.raises(RefusedFault, match=rf'{kind}: {stage.NAME} perform'):
        faults.check(stage, kind)
    else:
      faults.check(stage, kind)


def test_an_unknown_kind_is_refused():
  with pytest.raises(RefusedFault, match='flood: swarms perform kill, '):
    faults.check(SwarmStage, 'flood')


def test_all_that_a_scenario_draws_is_performed_by_a_swarm():
  drawn = {kind for kind, *_ in (*scenario.FAULTS, *scenario.WIDE_FAULTS)}
  drawn |= {'cut_one_way', 'kill_host', *scenario.SLICE_FAULTS}
  assert drawn == {*faults.performed_by(SwarmStage)}


def test_a_run_is_told_that_its_faults_are_kills():
  with pytest.raises(ConfigError, match="a run performs 'kill', not 'pause'"):
    lab_section.plan(('pause learner 0 at 0.5',), 2)
  with pytest.raises(ConfigError, match='expected kill learner N'):
    lab_section.plan(('flood learner 0 at 0.5',), 2)
