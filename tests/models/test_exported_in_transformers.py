# SPDX-License-Identifier: Apache-2.0
"""An export as `transformers` reads it: its logits and its tokens are ours.

Runs only where torch and transformers are installed, which nothing here needs.
"""

import dataclasses

import numpy as np
import pytest

from diloco.checkpoint import safetensors_files
from diloco.data.tokenizers import BYTES
from diloco.evaluation.export_files import exported_files
from diloco.models import api, hf_format
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig, ExpertsConfig

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

CONFIG = DecoderConfig(
  vocab=BYTES.vocab,
  layers=3,
  d_model=24,
  heads=4,
  kv_heads=2,
  head_dim=8,
  d_ff=40,
  rope_theta=500.0,
)
LENGTH = 32


def _export(folder, config):
  """Writes a model of drawn parameters, and returns them."""
  rng = np.random.default_rng(7)
  params = {
    path: (0.3 * rng.standard_normal(leaf.shape) + ('norm' in path)).astype('f')
    for path, leaf in api.check_model(make_decoder(config)).items()
  }
  tensors = hf_format.Tensors(config).exported(params)
  files = exported_files(config, LENGTH, BYTES)
  safetensors_files.write_exported(folder, tensors, files)
  return params


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize(
  'experts',
  [None, ExpertsConfig(5, 1), ExpertsConfig(5, 2), ExpertsConfig(5, 5)],
)
def test_logits_are_those_of_the_decoder(tmp_path, experts, tied):
  config = dataclasses.replace(CONFIG, experts=experts, tied=tied)
  params = _export(tmp_path, config)
  model, found = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype=torch.float32, output_loading_info=True
  )
  assert not any(found.values()), found
  tokens = np.random.default_rng(1).integers(0, config.vocab, (4, LENGTH))
  with torch.no_grad():
    theirs = model(torch.tensor(tokens)).logits.numpy()
  ours = make_decoder(config).logits(api.unflatten(params), tokens)
  np.testing.assert_allclose(theirs, ours, atol=5e-5)


def test_tokens_are_bytes_and_the_end_is_special(tmp_path):
  _export(tmp_path, CONFIG)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in ('größer\n\n \t zwei', ' Ā€ 😀 ', '\x7f\xa0\xad', 'a\0b'):
    tokens = tokenizer(text)['input_ids']
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text
  # Tools that score and draw text take it for padding and as a beginning.
  assert tokenizer.eos_token_id == BYTES.end
  assert tokenizer.decode([*b'ab', 0], skip_special_tokens=True) == 'ab'
