# SPDX-License-Identifier: Apache-2.0
"""The loss over a vocabulary: in chunks, on meshes, against differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.models import api, vocabulary
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig
from diloco.numerics import inner

CONFIG = DecoderConfig(
  vocab=24, layers=2, d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=20
)
LOSSES = {
  'plain': vocabulary.Loss(),
  'cap': vocabulary.Loss(cap=0.7),
  'z': vocabulary.Loss(z_weight=0.1),
  'both': vocabulary.Loss(cap=0.7, z_weight=0.1),
}


def _plain(loss, x, head, targets, counted):
  """The same, as it is written in a book; JAX differentiates it."""
  logits = x @ head.T
  if loss.cap:
    logits = loss.cap * jnp.tanh(logits / loss.cap)
  log = jax.nn.logsumexp(logits, axis=-1)
  hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  entropy = jnp.sum((log - hit) * counted) / jnp.sum(counted)
  square = jnp.sum(jnp.square(log) * counted) / jnp.sum(counted)
  right = (jnp.argmax(logits, axis=-1) == targets) * counted
  return entropy + loss.z_weight * square, {
    api.CROSS_ENTROPY: entropy,
    'accuracy': jnp.sum(right) / jnp.sum(counted),
    api.COUNTED: jnp.sum(counted),
  }


@pytest.mark.parametrize('logits_max', [1 << 26, 24 * 7, 24])
@pytest.mark.parametrize('name', LOSSES)
def test_loss_and_gradients_are_those_of_jax(name, logits_max, monkeypatch):
  """Whole, in chunks of 7 tokens of 22, one by one."""
  monkeypatch.setattr(vocabulary, 'LOGITS_MAX', logits_max)
  keys = jax.random.split(jax.random.key(0), 4)
  x = jax.random.normal(keys[0], (2, 11, 16))
  head = jax.random.normal(keys[1], (24, 16))
  targets = jax.random.randint(keys[2], (2, 11), 0, 24)
  counted = jax.random.bernoulli(keys[3], 0.7, (2, 11))

  def of(loss):
    gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
    return jax.jit(gradient, static_argnums=())(x, head)

  ours, found = of(lambda x, head: LOSSES[name](x, head, targets, counted))
  theirs, wanted = of(
    lambda x, head: _plain(LOSSES[name], x, head, targets, counted)
  )
  np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
  for key, value in ours[1].items():
    np.testing.assert_allclose(value, theirs[1][key], rtol=1e-6)
  assert (api.CROSS_ENTROPY in ours[1]) == bool(LOSSES[name].z_weight)
  for mine, its in zip(found, wanted):
    np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)


def test_no_array_of_all_logits_is_made(monkeypatch):
  """Nor one of rows of the table by token and vocabulary."""
  monkeypatch.setattr(vocabulary, 'LOGITS_MAX', 24 * 8)
  model = make_decoder(CONFIG)
  params = jax.eval_shape(model.init, jax.random.key(0))
  batch = {'tokens': jax.ShapeDtypeStruct((4, 17), jnp.int32)}
  step = jax.jit(jax.grad(lambda *x: model.loss(*x, None)[0]))
  text = step.lower(params, batch).as_text()
  assert '8x24' in text
  assert '64x24' not in text and '4x16x24' not in text


def test_packed_documents_have_the_losses_of_each_alone():
  model = make_decoder(CONFIG)
  params = model.init(jax.random.key(0))
  texts = [
    jax.random.randint(jax.random.key(i), (size,), 0, 24)
    for i, size in enumerate((9, 14, 6))
  ]
  ids = np.repeat(np.arange(3), [len(text) for text in texts])[None, :]
  packed = {'tokens': jnp.concatenate(texts)[None, :], 'segments': ids}
  loss = jax.jit(lambda batch: model.loss(params, batch, None)[0])
  each = [float(loss({'tokens': text[None, :]})) for text in texts]
  weights = [len(text) - 1 for text in texts]
  np.testing.assert_allclose(
    float(loss(packed)), np.average(each, weights=weights), atol=1e-5
  )
  # Else it would hold for a model that looks at nothing but the last token.
  unseen = dict(packed, segments=np.zeros_like(ids))
  assert abs(float(loss(unseen)) - np.average(each, weights=weights)) > 1e-3


def test_padding_is_not_counted():
  """Its segment is below 0."""
  model = make_decoder(CONFIG)
  params = model.init(jax.random.key(0))
  text = jax.random.randint(jax.random.key(1), (1, 9), 0, 24)
  longer = jnp.pad(text, ((0, 0), (0, 5)))
  ids = jnp.where(jnp.arange(14)[None, :] < 9, 0, -1)
  loss = jax.jit(lambda batch: model.loss(params, batch, None)[0])
  np.testing.assert_allclose(
    loss({'tokens': longer, 'segments': ids}), loss({'tokens': text}), rtol=1e-6
  )


def test_parts_of_a_batch_weigh_what_they_count():
  """Rows whose documents are unlike, one after the other."""
  model = make_decoder(CONFIG)
  params = model.init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (2, 14), 0, 24)
  batch = {
    'tokens': tokens,
    'segments': jnp.array([[0] * 14, [0] * 3 + [1] * 2 + [-1] * 9]),
  }
  in_parts = jax.jit(inner.accumulated, static_argnums=(0, 4, 5))

  def gradient(parts, counted):
    _, metrics, grads = in_parts(
      model.loss, params, batch, jax.random.key(2), parts, counted
    )
    return metrics, api.flatten(grads)

  (whole, expected), (metrics, found) = (
    gradient(parts, api.COUNTED) for parts in (1, 2)
  )
  assert whole[api.COUNTED] == metrics[api.COUNTED] == 13 + 3
  np.testing.assert_allclose(metrics['accuracy'], whole['accuracy'], rtol=1e-6)
  for path, value in expected.items():
    np.testing.assert_allclose(found[path], value, rtol=1e-4, atol=1e-6)
  _, unweighted = gradient(2, None)
  assert any(
    not np.allclose(unweighted[path], expected[path], rtol=0.1)
    for path in expected
  )
