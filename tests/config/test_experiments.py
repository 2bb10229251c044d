# SPDX-License-Identifier: Apache-2.0
"""Every file in experiments/ can be built, also small, and says what it is."""

import importlib
import pathlib

import numpy as np
import pytest

import experiments
from diloco.config import lab_section, run_config, sections, simulation
from diloco.numerics import codec
from diloco.sweeps import sweep
from experiments import baselines, common, four_bits

FOLDER = pathlib.Path(experiments.__file__).parent
NAMES = sorted(
  path.stem
  for path in FOLDER.glob('*.py')
  if path.stem
  not in (
    '__init__',
    'common',
    'four_bits',
    'own_loop',
    'scales',
    'study',
    'tried',
    'wall_clock',
  )
)
SIMULATIONS = sorted(simulation.STUDIES)
RUNS = sorted(set(NAMES) - set(SIMULATIONS))
SWEEPS = [
  name
  for name in RUNS
  if hasattr(importlib.import_module(f'experiments.{name}'), 'sweep')
]


@pytest.mark.parametrize('name', RUNS)
@pytest.mark.parametrize('arg', [None, 'quicktest', 'learners=4'])
def test_an_experiment_builds(name, arg):
  module = importlib.import_module(f'experiments.{name}')
  config = run_config.build(module.get_config(arg).lock())
  lab_section.plan(config.faults, config.protocol.learners)


@pytest.mark.parametrize('name', SWEEPS)
def test_the_variants_of_a_sweep_build(name):
  module = importlib.import_module(f'experiments.{name}')
  for variant in sweep.variants(module.sweep):
    _build(module.get_config(), variant)


@pytest.mark.parametrize('arg', ['quicktest', 'learners=2'])
def test_the_baselines_build_with_other_learners(arg):
  for variant in sweep.variants(baselines.sweep):
    _build(baselines.get_config(arg), variant)


def _build(config, variant):
  config.update_from_flattened_dict(dict(variant.changes))
  run_config.build(config)


@pytest.mark.parametrize('name', SIMULATIONS)
@pytest.mark.parametrize('arg', [None, 'quicktest'])
def test_a_simulation_builds(name, arg):
  module = importlib.import_module(f'experiments.{name}')
  config = simulation.build(module.get_config(arg).lock())
  assert config.study.kind == name


@pytest.mark.parametrize('name', NAMES)
def test_an_experiment_says_what_it_answers_and_has_a_row(name):
  text = importlib.import_module(f'experiments.{name}').__doc__
  assert '?' in text.split('\n\n')[0]
  assert f'`{name}.py`' in (FOLDER / 'README.md').read_text()


def test_quicktest_keeps_the_character_of_a_run():
  config = common.base()
  config.codec.up = 'int8'
  config.protocol.admission = 'fresh'
  common.quicktest(config)
  assert config.codec.up == 'int8'
  assert config.protocol.admission == 'fresh'
  assert config.protocol.total_steps == 40


def test_arguments_are_typed_by_their_defaults():
  args = common.parse_arg(
    'quick,learners=4,lr=0.5,name=x', quick=False, learners=2, lr=1.0, name=''
  )
  assert args.to_dict() == {
    'quick': True, 'learners': 4, 'lr': 0.5, 'name': 'x',
  }  # fmt: skip
  assert common.parse_arg(None, quick=False).quick is False
  assert common.parse_arg('quick=false', quick=True).quick is False


@pytest.mark.parametrize(
  ('arg', 'message'),
  [
    ('quik', "unknown argument 'quik' of the config, it takes learners, quick"),
    ('learners=four', "learners='four' of the config must be of type int"),
    ('quick=maybe', "quick='maybe' of the config must be of type bool"),
    ('learners', "learners='true' of the config must be of type int"),
  ],
)
def test_a_wrong_argument_is_named(arg, message):
  with pytest.raises(ValueError, match=message):
    common.parse_arg(arg, quick=False, learners=2)


def test_e3m0_has_its_levels_to_the_nearest():
  made = codec.check_codec(four_bits.e3m0(sections.CodecConfig()))
  scale = 4.0  # A power of two: a bf16 as it is.
  levels = [0.0, *(scale * 2.0**k for k in range(-6, 1))]
  x = np.array([*levels, *(-each for each in levels[1:])], np.float32)
  np.testing.assert_array_equal(made.decode(made.encode(x), x.size), x)
  between = np.array([4.0, 2.9, 3.1, -0.04, 0.02, -1.49], np.float32)
  found = made.decode(made.encode(between), between.size)
  np.testing.assert_array_equal(found, [4.0, 2.0, 4.0, -0.0625, 0.0, -1.0])
  assert codec.value_bytes(made) == 0.515625  # As int4.


def test_int4_rounded_at_random_has_the_value_as_its_mean():
  made = codec.check_codec(four_bits.at_random(sections.CodecConfig()))
  x = np.linspace(-1, 1, 128, dtype=np.float32)
  found = []
  for i in range(400):
    drawn = np.append(x, np.float32(i))  # Another vector has other draws.
    found.append(made.decode(made.encode(drawn), drawn.size)[: x.size])
  off = np.abs(np.array(found) - x)
  assert off.max() <= 1 / 7 + 1e-6
  # Each is within four standard deviations, half a level each at most.
  assert np.abs(np.mean(found, axis=0) - x).max() < 4 * 0.5 / 7 / 20
  np.testing.assert_array_equal(made.encode(x), made.encode(x))
