# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of an inner step by convention: what the MFU counts.

Model FLOPs utilisation is the model's FLOPs over the peak of the chips in the
time of a step (Chowdhery et al., 2022, appendix B): 6 per token for each
parameter that a token is multiplied with, and 12 · layers · heads · head_dim ·
length per token for the attention, whose square is counted whole though it is
causal. What is computed again to save memory (remat) is not counted, nor are
norms, softmax and the optimizer.
"""

import dataclasses

from diloco.models.decoder_config import DecoderConfig

PER_PARAMETER = 6  # A product forward, two backward, a multiply and an add.
PER_SCORE = 12  # The same of two products: scores, and what they mix.


@dataclasses.dataclass(frozen=True)
class StepFlops:
  """Of one inner step of a learner.

  Attributes:
    active: parameters that a token is multiplied with, N of 6ND: matrices of
      attention and MLPs (of the experts that are asked), router, head; not
      the look-up of the embedding, and no norm.
    tokens: of the step, D.
    products: 6ND.
    attention: of scores and their mixing.
  """

  active: int
  tokens: int
  products: int
  attention: int

  @property
  def total(self) -> int:
    return self.products + self.attention


def step_flops(config: DecoderConfig, batch: int, seq_len: int) -> StepFlops:
  """Of a batch of `batch` sequences."""
  active = active_parameters(config)
  tokens = batch * seq_len
  scores = config.layers * config.heads * config.head_dim * seq_len
  return StepFlops(
    active=active,
    tokens=tokens,
    products=PER_PARAMETER * active * tokens,
    attention=PER_SCORE * scores * tokens,
  )


def active_parameters(config: DecoderConfig) -> int:
  """See `StepFlops.active`."""
  heads = 2 * config.heads + 2 * config.kv_heads
  mlp = 3 * config.d_model * config.d_ff
  if config.experts:
    mlp *= config.experts.top_k
    mlp += config.d_model * config.experts.experts  # The router.
  layer = config.d_model * heads * config.head_dim + mlp
  return config.layers * layer + config.vocab * config.d_model
