# SPDX-License-Identifier: Apache-2.0
"""Draws text from a model, token by token, of several prompts at once.

Suffixes of arrays give their shape:
  B prompts, L window, V vocab.
"""

from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.models import api
from diloco.run.on_devices import OnDevices

BYTES = 256  # In a byte model, later token ids are not bytes.


class Sampler:
  """A model's next tokens, compiled once for a window, temperature and k.

  The same seed and prompt give the same text on one machine type.
  """

  def __init__(
    self,
    language: api.Language,
    devices: OnDevices,
    params: Mapping[str, np.ndarray],
    window: int,
    temperature: float,
    top_k: int,
    vocab: int = BYTES,
  ):
    """Checks the arguments; compiles nothing yet.

    Args:
      window: L, the number of tokens that a token is drawn after; earlier ones
        are forgotten.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: draws from the k likeliest only; 0 draws from all.
      vocab: tokens from here on are never drawn.

    Raises:
      ValueError: a number is out of its range.
    """
    if window < 1:
      raise ValueError(f'{window=}: must be at least 1')
    if not 0 <= temperature < float('inf'):
      raise ValueError(f'{temperature=}: must be finite and at least 0')
    if top_k < 0:
      raise ValueError(f'{top_k=}: must be at least 0, which is all')
    self._devices = devices
    self._params = devices.place(params)
    self._window = window

    def drawn(logits_BV, keys_B):
      """Returns a token of each row, int32 [B]."""
      logits_BV = logits_BV[:, :vocab]
      if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
      # Before top-k is applied: equal logits stay equal.
      heated_BV = logits_BV / temperature
      if 0 < top_k < heated_BV.shape[1]:
        least_B1 = jax.lax.top_k(heated_BV, top_k)[0][:, -1:]
        heated_BV = jnp.where(heated_BV >= least_B1, heated_BV, -jnp.inf)
      draw = jax.vmap(jax.random.categorical)
      return draw(keys_B, heated_BV).astype(jnp.int32)

    def start(params, tokens_BL, lengths_B, keys_B):
      logits_BV, cache = language.start(params, tokens_BL, lengths_B)
      return drawn(logits_BV, keys_B), cache

    def go_on(params, token_B, cache, keys_B):
      logits_BV, cache = language.go_on(params, token_B, cache)
      return drawn(logits_BV, keys_B), cache

    self._start = devices.jit(start)
    self._go_on = devices.jit(go_on, donate_argnums=2)

  def sample(
    self, prompts: Sequence[Sequence[int]], length: int, seed: int
  ) -> Iterator[list[int]]:
    """Yields `length` times the token that follows each prompt and what has
    been drawn after it.

    Args:
      prompts: tokens that the model knows, at least one of each.
      seed: seed of all draws; token i of a prompt has a key of its own, which
        the other prompts do not change.
    """
    tokens_BL = np.zeros((len(prompts), self._window), np.int32)
    lengths_B = np.zeros(len(prompts), np.int32)
    for row_L, (b, prompt) in zip(tokens_BL, enumerate(prompts)):
      seen = list(prompt[-self._window :])
      row_L[: len(seen)], lengths_B[b] = seen, len(seen)
    roots_B = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.key(seed), jnp.arange(len(prompts))
    )
    asked = self._devices.rows((tokens_BL, lengths_B))
    token_B, cache = self._start(self._params, *asked, _keys(roots_B, 0))
    for i in range(1, length):
      yield np.asarray(token_B).tolist()
      token_B, cache = self._go_on(
        self._params, token_B, cache, _keys(roots_B, i)
      )
    yield np.asarray(token_B).tolist()


@jax.jit
def _keys(roots_B: jax.Array, i: int) -> jax.Array:
  """Returns the keys of the i-th token of each row."""
  return jax.vmap(jax.random.fold_in, (0, None))(roots_B, i)


def check_prompt(prompt: bytes, vocab: int) -> None:
  """Raises ValueError if the prompt is empty or has bytes unknown to the model.

  Args:
    vocab: the model's tokens are 0 … vocab - 1, and a byte is its own token.
  """
  if not prompt:
    raise ValueError('prompt: is empty, there is nothing to go on from')
  if foreign := sorted({byte for byte in prompt if byte >= vocab}):
    names = ', '.join(f'0x{byte:02x}' for byte in foreign)
    raise ValueError(
      f'prompt: has the bytes {names}, but the vocabulary is 0 … '
      f'0x{vocab - 1:02x}'
    )
