# SPDX-License-Identifier: Apache-2.0
"""Environment variables by role, and the flags of accelerators."""

import pytest

from launch import variables
from launch.program import KINDS

ASKED = (
  'A=1',
  'learner:A=2',
  'syncer:B==x',
  'learner:LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=false',
)


def test_a_role_gets_its_own_behind_those_of_all():
  of = {kind: dict(variables.of_kind(ASKED, kind)) for kind in KINDS}
  assert of['evaluator'] == of['shard'] == {'A': '1'}
  assert of['syncer'] == {'A': '1', 'B': '=x'}
  assert of['learner']['A'] == '2'


def test_what_is_asked_for_stands_behind_the_default():
  own = variables.of_kind(ASKED, 'learner')
  launcher = {'XLA_FLAGS': '--x', 'LIBTPU_INIT_ARGS': '--y'}
  name, default = variables.OVERLAP[variables.TPU]
  flags = dict(variables.on(variables.TPU, own))[name].split()
  assert flags == [*default, '--xla_enable_async_all_gather=false']
  flags = dict(variables.on(variables.TPU, own, launcher))[name].split()
  assert flags == [*default, '--y', '--xla_enable_async_all_gather=false']
  gpu = dict(variables.on(variables.GPU, (), launcher))
  assert gpu['XLA_FLAGS'].endswith(' --x')
  assert 'LIBTPU_INIT_ARGS' not in gpu


@pytest.mark.parametrize(
  ('text', 'problem'),
  [
    ('A', 'must be NAME=VALUE, or ROLE:NAME=VALUE'),
    ('=1', 'must be NAME=VALUE'),
    ('worker:A=1', "'worker' must be one of syncer, shard, learner, ren"),
  ],
)
def test_what_can_not_be_is_named(text, problem):
  (said,) = variables.problems([text, *ASKED], KINDS)
  assert said.startswith(f'--env={text}: ') and problem in said
