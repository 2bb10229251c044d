# SPDX-License-Identifier: Apache-2.0
"""Weights of other tools: their logits are ours, and they go back unchanged.

tests/models/hf has what `transformers` saved and computed, see
`make_hf_models.py`.
"""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from diloco.checkpoint.parameters import write_parameters
from diloco.checkpoint.safetensors_files import TensorFiles, write_exported
from diloco.config import pretrained
from diloco.config.sections import ModelConfig
from diloco.metrics.workdir import Workdir
from diloco.models import api, hf_format
from diloco.models.decoder import make_decoder
from diloco.models.kinds import sizes_of
from diloco.run.initial_weights import open_weights

FOLDER = pathlib.Path(__file__).parent / 'hf'
FAMILIES = sorted(path.name for path in FOLDER.iterdir())


def _section(folder: pathlib.Path, **more) -> ModelConfig:
  keys = pretrained.keys_of(f'hf:{folder}')
  model = {
    key.removeprefix('model.'): value
    for key, value in keys.items()
    if key.startswith('model.')
  }
  return ModelConfig(**(model | more))


def _shapes(section: ModelConfig) -> dict[str, tuple[int, ...]]:
  return {path: x[0] for path, x in sizes_of(section).arrays.items()}


def _params(section: ModelConfig) -> dict[str, np.ndarray]:
  shapes = _shapes(section)
  return open_weights(section, shapes).whole(shapes)


@pytest.mark.parametrize('family', FAMILIES)
def test_logits_are_those_of_transformers(family):
  recorded = np.load(FOLDER / family / 'logits.npz')
  section = _section(FOLDER / family)
  arguments = (
    api.unflatten(_params(section)),
    recorded['tokens'].astype(np.int32),
  )
  lowered = jax.jit(make_decoder(sizes_of(section)).logits).lower(*arguments)
  # Compiled quickly, which takes longer than to run it.
  logits = lowered.compile({'xla_backend_optimization_level': 0})(*arguments)
  assert np.ptp(recorded['logits']) > 5
  np.testing.assert_allclose(logits, recorded['logits'], atol=1e-4)


@pytest.mark.parametrize('family', FAMILIES)
def test_what_was_exported_comes_back_to_the_byte(family, tmp_path):
  source, once, twice = FOLDER / family, tmp_path / '1', tmp_path / '2'
  for before, after in ((source, once), (once, twice)):
    section = _section(before)
    settings = hf_format.exported_config(
      sizes_of(section),
      8,
      0,
      '',
      json.loads((before / 'config.json').read_text()),
    )
    tensors = hf_format.Tensors(sizes_of(section)).exported(_params(section))
    write_exported(after, tensors, {'config.json': settings})
  for path in once.iterdir():
    assert path.read_bytes() == (twice / path.name).read_bytes(), path.name
  read, written = TensorFiles(source), TensorFiles(once)
  assert read.shapes == written.shapes
  for name, shape in read.shapes.items():
    box = tuple((0, n) for n in shape)
    np.testing.assert_array_equal(read.read(name, box), written.read(name, box))
  settings = json.loads((source / 'config.json').read_text())
  again = json.loads((once / 'config.json').read_text())
  assert again == settings | {'dtype': 'float32'}


def test_any_box_of_a_mixture_of_experts_is_read(tmp_path):
  """Gate lies above up in one tensor; heads and head_dim in one axis."""
  section = ModelConfig(
    kind='moe', experts=3, top_k=2, layers=2, vocab=8, d_model=10, heads=4,
    kv_heads=2, head_dim=6, d_ff=7, qkv_bias=True, qk_norm=True,
  )  # fmt: skip
  config = sizes_of(section)
  rng = np.random.default_rng(0)
  params = {
    path: rng.standard_normal(shape).astype(np.float32)
    for path, (shape, _) in config.arrays.items()
  }
  tensors = hf_format.Tensors(config)
  write_exported(tmp_path, tensors.exported(params), {})
  files = TensorFiles(tmp_path)
  tensors.check(files.shapes)
  for path, x in params.items():
    for _ in range(5):
      box = []
      for n in x.shape:
        first = int(rng.integers(n))
        box.append((first, int(rng.integers(first, n)) + 1))
      found = tensors.read(path, tuple(box), files.read)
      expected = x[tuple(slice(*ends) for ends in box)]
      np.testing.assert_array_equal(found, expected, err_msg=path)


def _spoil_tensors(folder, change):
  """Writes the tensors anew, in one file, changed."""
  files = TensorFiles(folder)
  tensors = {
    name: files.read(name, tuple((0, n) for n in shape))
    for name, shape in files.shapes.items()
  }
  change(tensors)
  write_exported(folder, tensors, {})


def _spoil_settings(**keys):
  def spoil(folder):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))

  return spoil


def _cut_off(folder):
  path = folder / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-100])


NORM = 'model.norm.weight'


@pytest.mark.parametrize(
  'spoil, problem',
  [
    (
      lambda f: _spoil_tensors(f, lambda x: x.pop(NORM)),
      f"'{NORM}' is missing",
    ),
    (
      lambda f: _spoil_tensors(f, lambda x: x.update({NORM: x[NORM][1:]})),
      rf"'{NORM}' is of shape \[31\], must be of \[32\]",
    ),
    (
      lambda f: _spoil_tensors(f, lambda x: x.update(other=x[NORM])),
      "'other' is none of the decoder",
    ),
    (_cut_off, 'model.safetensors: .*incomplete'),
    (lambda f: (f / 'model.safetensors').unlink(), 'there is no model.safe'),
    (_spoil_settings(model_type='gpt2'), "model_type='gpt2': must be one of"),
    (_spoil_settings(attention_bias=True), 'attention_bias=True: our decoder'),
    (_spoil_settings(hidden_act='relu'), "hidden_act='relu'"),
    (_spoil_settings(hidden_size=None), 'hidden_size: is missing'),
    (
      _spoil_settings(rope_parameters={'rope_type': 'yarn', 'factor': 4.0}),
      "rope_type='yarn': must be",
    ),
    (
      _spoil_settings(rms_norm_eps=1e-6),
      r'model\.norm_epsilon=1e-05: .* has 1e-06',
    ),
  ],
)
def test_what_can_not_be_used_is_named(tmp_path, spoil, problem):
  folder = tmp_path / 'llama'
  shutil.copytree(FOLDER / 'llama', folder)
  section = _section(folder)
  assert open_weights(section) is not None
  spoil(folder)
  with pytest.raises((ValueError, FileNotFoundError), match=problem) as raised:
    open_weights(section)
  assert '\n' not in str(raised.value)


def test_rope_may_be_stretched_and_the_fingerprint_is_of_values(tmp_path):
  longer = _section(FOLDER / 'mistral', rope_theta=2e6, window=0)
  weights = open_weights(longer)
  shapes = _shapes(longer)
  bf16 = weights.fingerprint(shapes)
  shutil.copytree(FOLDER / 'mistral', tmp_path, dirs_exist_ok=True)
  _spoil_tensors(tmp_path, lambda x: None)  # The same values, as f32.
  assert open_weights(_section(tmp_path)).fingerprint(shapes) == bf16
  _spoil_tensors(tmp_path, lambda x: x[NORM].__setitem__(0, 3))
  assert open_weights(_section(tmp_path)).fingerprint(shapes) != bf16


def test_a_run_is_a_source_and_hands_on_the_files_of_its_own(tmp_path):
  section = _section(FOLDER / 'qwen2')
  params, run = _params(section), Workdir(tmp_path / 'run')
  write_parameters(run.parameters, params)
  pretrained.of_model(section).keep_files(run.pretrained)
  run.config.write_text(json.dumps({'model': dataclasses.asdict(section)}))
  for value in (run.root, run.parameters):
    keys = pretrained.keys_of(str(value))
    assert keys['model.qkv_bias'] and keys['model.vocab'] == 64
    again = dataclasses.replace(section, init_from=str(value))
    shapes = _shapes(section)
    weights = open_weights(again, shapes)
    for path, x in params.items():
      box = tuple((n // 2, n) for n in x.shape)
      np.testing.assert_array_equal(
        weights.read(path, box), x[tuple(slice(*ends) for ends in box)]
      )
    kept = pretrained.Pretrained(str(value)).files
    assert pretrained.kept_files(kept).keys() == {
      'config.json',
      'generation_config.json',
    }
  shapes['norm'] = (33,)
  with pytest.raises(ValueError, match=r"'norm' is of shape \[32\], must be"):
    open_weights(again, shapes)
