# SPDX-License-Identifier: Apache-2.0
"""Settings of single learners: how they are read, and what is refused."""

import types

import pytest

from diloco.config import run_config, unlike
from diloco.config.sections import ConfigError
from diloco.lab.run import train
from experiments import tests_tiny


def setups(text: str, learners: int = 4):
  config = tests_tiny.get_config()
  config.unlike_learners = text
  return unlike.setups(run_config.build(config), learners)


def test_learners_are_alike_unless_it_is_said():
  first, *others = setups('')
  assert others == [first] * 3
  assert (first.arguments, first.machines) == ((), {})


def test_one_and_a_range_of_ids():
  found = setups(
    '0: data.batch=8,mesh.fsdp=2 ; 1: mesh.slices=2; '
    '2-3:hosts=2, accelerator=cpu'
  )
  assert found[0].config.data.batch == 8
  assert found[0].config.mesh.devices == 2
  assert found[0].arguments == ('--config.data.batch=8', '--config.mesh.fsdp=2')
  mesh = found[1].config.mesh
  assert (mesh.devices, mesh.slice_devices) == (2, 1)
  assert mesh.product.startswith('mesh.slices=2 * mesh.fsdp=1')
  assert found[2] == found[3]
  assert found[2].machines == {'hosts': 2, 'accelerator': 'cpu'}
  assert found[2].arguments == ()


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('1: data.seq_len=64', 'learner 1: data.seq_len=64: is the same for all'),
    ('1: data.seq_len=64', 'may differ is data.batch, inner.accumulate, mesh.'),
    ('1: mesh.fdsp=2', 'did you mean mesh.fsdp?'),
    ('4: hosts=2', 'learner 4: the run has learners 0 to 3'),
    ('2-4: hosts=2', 'learner 2-4: the run has learners 0 to 3'),
    ('3-2: hosts=2', 'learner 3-2: the run has learners 0 to 3'),
    ('1: hosts=2; 0-1: hosts=1', 'learner 0-1: has two entries'),
    ('1: hosts=two', 'learner 1: hosts=two: must be a number'),
    ('hosts=2', "'hosts=2': must be like 1: data.batch=2"),
    (
      '1: data.batch=6, mesh.fsdp=4',
      'learner 1: data.batch=6: must be a multiple of mesh.fsdp=4',
    ),
    ('1: mesh.tensor=4', 'learner 1: model.heads=2: must be a multiple of'),
  ],
)
def test_what_can_not_be(text, words):
  with pytest.raises(ConfigError) as caught:
    setups(text)
  assert words in str(caught.value)


def test_all_that_is_wrong_is_said():
  with pytest.raises(ConfigError) as caught:
    setups('1: seed=2, data.batch=6, mesh.fsdp=4; 9: hosts=2')
  assert len(caught.value.problems) == 3


def test_tokens_of_a_step_are_of_all_learners():
  config = tests_tiny.get_config('learners=3')
  config.unlike_learners = '1: data.batch=6'
  assert unlike.tokens_per_step(run_config.build(config)) == (4 + 6 + 4) * 32


def test_they_are_no_part_of_what_processes_agree_on():
  config = tests_tiny.get_config()
  alike = run_config.agreement(run_config.build(config))
  config.unlike_learners = '1: data.batch=6'
  config.data.batch = 8
  assert run_config.agreement(run_config.build(config)) == alike
  assert not run_config.differences(alike, alike | {'data.batch': '4'})


def test_a_run_that_is_older_has_learners_that_are_alike():
  fields = run_config.unfold({'name': 'old'})
  assert fields['unlike_learners'] == ''


def test_data_parallel_refuses_them():
  given = tests_tiny.get_config()
  given.unlike_learners = '1: data.batch=8'
  given.lab.system = 'data_parallel'
  config = run_config.build(given)
  with pytest.raises(ConfigError, match='has one batch and one mesh'):
    train(types.SimpleNamespace(config=config))
