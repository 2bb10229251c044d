# SPDX-License-Identifier: Apache-2.0
"""Draws text from a model, token by token, in a window of fixed length.

Every token costs a pass over the whole window: there is no KV cache. That is
simple, compiles once, and is fast enough for models of a laptop's size.

Suffixes of arrays give their shape:
  L window, V vocab.
"""

from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.models import api

BYTES = 256  # In a byte model, later token ids are not bytes.


class Sampler:
  """A model's next token, compiled once for a window, temperature and k.

  The same seed and prompt give the same text on one machine type.
  """

  def __init__(
    self,
    model: api.Model,
    params: Mapping[str, np.ndarray],
    window: int,
    temperature: float,
    top_k: int,
    vocab: int = BYTES,
  ):
    """Checks the arguments; compiles nothing yet.

    Args:
      window: L, the number of tokens that the model sees; earlier ones are
        dropped.
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
    self._params = {path: jnp.asarray(x) for path, x in params.items()}
    self._window = window

    def draw(params, tokens_L, count, key):
      """Returns the token after `tokens_L[:count]`, as an int32 scalar."""
      logits_LV = model.logits(api.unflatten(params), tokens_L[None])[0]
      logits_V = logits_LV[count - 1, :vocab]
      if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
      # Before top-k is applied: equal logits stay equal.
      heated_V = logits_V / temperature
      if 0 < top_k < heated_V.shape[0]:
        least = jax.lax.top_k(heated_V, top_k)[0][-1]
        heated_V = jnp.where(heated_V >= least, heated_V, -jnp.inf)
      return jax.random.categorical(key, heated_V).astype(jnp.int32)

    self._draw = jax.jit(draw)

  def sample(
    self, prompt: Sequence[int], length: int, seed: int
  ) -> Iterator[int]:
    """Yields `length` tokens that follow `prompt`, one after the other.

    Args:
      prompt: tokens that the model knows, at least one.
      seed: seed of all draws; token i has a key of its own.
    """
    tokens = list(prompt[-self._window :])
    root = jax.random.key(seed)
    for i in range(length):
      window_L = np.zeros(self._window, np.int32)
      window_L[: len(tokens)] = tokens
      key = jax.random.fold_in(root, i)
      drawn = int(self._draw(self._params, window_L, len(tokens), key))
      yield drawn
      tokens = [*tokens, drawn][-self._window :]


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
