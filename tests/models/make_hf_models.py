# SPDX-License-Identifier: Apache-2.0
"""Makes the models of tests/models/hf: python -m tests.models.make_hf_models

Small models of drawn parameters by `transformers`, as it saves them, and the
logits that it computes in f32. Needs torch and transformers (5.24 and torch
2.13 made those that are here), which nothing else does.
"""

import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent / 'hf'
LENGTH = 24
SIZES = {
  'vocab_size': 64,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
}
LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 100.0,  # Short and long waves among those of a small head.
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
LINEAR = {'rope_type': 'linear', 'rope_theta': 500.0, 'factor': 4.0}
STORED = {'llama': 'float32', 'llama-tied': 'float16'}  # The others: bfloat16.
# Name -> class and what differs from `SIZES`.
MODELS = {
  'llama': ('Llama', {'rope_parameters': LLAMA3, 'rms_norm_eps': 1e-5}),
  'llama-tied': (
    'Llama',
    {'rope_parameters': LINEAR, 'tie_word_embeddings': True},
  ),
  'mistral': ('Mistral', {'sliding_window': 7, 'head_dim': 10}),
  'qwen2': ('Qwen2', {'tie_word_embeddings': True}),
  'qwen3': ('Qwen3', {'head_dim': 12}),
  'gemma': ('Gemma', {'head_dim': 16}),
}


def main():
  """Writes all of them."""
  import torch
  import transformers

  for seed, (name, (kind, more)) in enumerate(MODELS.items()):
    torch.manual_seed(seed)
    stored = getattr(torch, STORED.get(name, 'bfloat16'))
    config = getattr(transformers, f'{kind}Config')(**{**SIZES, **more})
    model = getattr(transformers, f'{kind}ForCausalLM')(config).float().eval()
    with torch.no_grad():
      for x in model.parameters():
        # Large enough for each term to count, biases and scales as well.
        x.add_(torch.randn(x.shape) * (0.2 if x.ndim == 1 else 0.15))
        x.copy_(x.to(stored))  # As it is saved.
      tokens = torch.randint(0, config.vocab_size, (2, LENGTH))
      logits = model(tokens).logits.numpy()
    folder = FOLDER / name
    model.to(stored)
    # Some kB a file, so that there is an index and a layer is in several.
    options = {'max_shard_size': '12KB'} if name == 'qwen3' else {}
    model.save_pretrained(folder, **options)
    np.savez(folder / 'logits.npz', tokens=tokens.numpy(), logits=logits)


if __name__ == '__main__':
  main()
