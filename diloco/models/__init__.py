# SPDX-License-Identifier: Apache-2.0
"""Models: a model is a pair of functions on plain pytrees.

Start with `api`: `Model`, and `plain_model`, which makes one of your own
`init` and `loss`. `model.kind` of the configuration names one of

  decoder    embedding, layers, output head; with `layers`, `moe`, `routing`
  quadratic  a bowl with noise: many parameters, cheap steps
  module:function   of the user, `experiments/own_model.py` shows one

  kinds           the kinds by name, free of jax
  decoder_config  the size of a decoder, free of jax
  attention       what computes it, by name
  vocabulary      rows of tokens, and the loss in chunks
  sharding        logical axes to a mesh of four axes
  flops           arithmetic of a step, which the MFU counts
  hf_format       as Hugging Face's models, both ways; free of jax
"""
