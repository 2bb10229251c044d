# SPDX-License-Identifier: Apache-2.0
"""Counts the FLOPs of an inner step, by the convention of MFU.

Model FLOPs utilisation is the model's FLOPs over the peak of the chips in the
time of a step (Chowdhery et al., 2022, appendix B): 6 per token for each
parameter that a token is multiplied with, and 12 · layers · heads · head_dim ·
length per token for the attention, whose square is counted in full although it
is causal; a window counts in place of the length. Recomputation (remat) is not
counted, nor are norms, softmax and the optimizer.
"""

import dataclasses

from diloco.models.decoder_config import DecoderConfig

PER_PARAMETER = 6  # One product forward, two backward; a multiply and an add.
PER_FROZEN = 4  # It has no gradient of its own: that of LoRA's matrices.
# `PER_PARAMETER` for two products: scores, and the weighted values.
PER_SCORE = 12


@dataclasses.dataclass(frozen=True)
class StepFlops:
  """FLOPs of one inner step of a learner.

  Attributes:
    active: parameters that a token is multiplied with, N of 6ND: matrices of
      attention and MLPs (of the chosen experts), router, head; not the look-up
      of the embedding, and no norm.
    tokens: tokens of the step, D.
    products: 6ND; 4ND where adapters alone are trained, which are not counted.
    attention: FLOPs of scores and weighted values.
  """

  active: int
  tokens: int
  products: int
  attention: int

  @property
  def total(self) -> int:
    return self.products + self.attention


def step_flops(config: DecoderConfig, batch: int, seq_len: int) -> StepFlops:
  """Returns the FLOPs of a step on `batch` sequences."""
  active = active_parameters(config)
  tokens = batch * seq_len
  seen = min(config.window or seq_len, seq_len)
  scores = config.layers * config.heads * config.head_dim * seen
  return StepFlops(
    active=active,
    tokens=tokens,
    products=(PER_FROZEN if config.lora_rank else PER_PARAMETER)
    * active
    * tokens,
    attention=PER_SCORE * scores * tokens,
  )


def active_parameters(config: DecoderConfig) -> int:
  """Returns the parameters that multiply a token; see `StepFlops.active`."""
  heads = 2 * config.heads + 2 * config.kv_heads
  mlp = 3 * config.d_model * config.d_ff
  if config.experts:
    mlp *= config.experts.top_k
    mlp += config.d_model * config.experts.experts  # The router.
  layer = config.d_model * heads * config.head_dim + mlp
  return config.layers * layer + config.vocab * config.d_model
