# SPDX-License-Identifier: Apache-2.0
"""The arithmetic: fragments, codecs, merge, outer and inner step.

Start with `merge` and `outer`: what is merged, and how Θ moves.

  fragments         cuts a model into P fragments
  codec             codecs by name: vectors of f32 to bytes and back
  payload           the bytes of a fragment, whole or of some boxes of it
  native            calls blocks.c: the hot path in one pass, with the same bits
  merge             merges outer gradients (Alg. 2, line 12)
  outer             the outer step, with error feedback
  inner             the inner step: AdamW, accumulation
  optimizers        inner and outer optimizers by name; free of jax
  schedule          inner learning rate
  blend             how a learner takes in an updated fragment
  mesh_partition    what of an array each host of a learner holds
  shard_assignment  which shard of the syncer owns which piece

Nothing is re-exported: `codec`, `payload` and `schedule` serve programs that
must not import jax.
"""
