# SPDX-License-Identifier: Apache-2.0
"""A random language whose entropy rate is known exactly.

A Markov source: each context of `order` symbols is followed by one of five
successors, with the probabilities 8, 4, 2, 1 and 1 sixteenths. Which five, and
in which order, is drawn per context from the seed; the probabilities are the
same in every context, and so is their entropy: it is the entropy rate, whatever
the contexts' frequencies.

All randomness is integer arithmetic modulo 2^64 on a counter (the mixing
function of SplitMix64), so a seed gives the same bytes on every machine.
"""

import math
import string

import numpy as np

from diloco.data.corpus import Corpus, make_corpus

CHANCES = (8, 4, 2, 1, 1)  # Sixteenths.
# 1.875 bits: no model does better, given `order` bytes of context.
ENTROPY_RATE = -sum(c / 16 * math.log(c / 16) for c in CHANCES)  # Nats a byte.
ALPHABET = string.ascii_lowercase + string.ascii_uppercase
ORDER_MAX = 4
CONTEXTS_MAX = 1 << 20  # Bounds the memory of the table.
HELDOUT_PERCENT = 4

_WALK, _TABLE = 0, 1  # Streams of draws.


def grammar_corpus(
  seed: int, nbytes: int, order: int = 2, symbols: int = 16
) -> Corpus:
  """Returns text of the language `seed`; the held-out part continues it.

  Args:
    seed: Seed of the language and of the walk through it, from 0 to 2^32 - 1.
    nbytes: Bytes of training text; 4 % more are held out, at least 1,024.
    order: Symbols of context that decide what may follow, from 1 to 4.
    symbols: Size of the alphabet, from 5 to 52.

  Raises:
    ValueError: An argument is out of its range, or there would be more than
      `CONTEXTS_MAX` contexts.
  """
  _check(seed, nbytes, order, symbols)
  heldout = max(1024, nbytes * HELDOUT_PERCENT // 100)
  text = _walk(seed, nbytes + heldout, order, symbols)
  name = f'grammar {seed=} {order=} {symbols=}'
  return make_corpus(name, text[:nbytes], text[nbytes:])


def draws(seed: int, stream: int, count: int) -> np.ndarray:
  """Returns uniform uint64 [count]; streams of one seed are independent."""
  mix = np.uint64(seed) << np.uint64(32) | np.uint64(stream)
  with np.errstate(over='ignore'):
    start = _mixed(np.asarray([mix]))
    step = np.uint64(0x9E3779B97F4A7C15)
    return _mixed(start + step * np.arange(1, count + 1, dtype=np.uint64))


def _mixed(z: np.ndarray) -> np.ndarray:
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return z ^ (z >> np.uint64(31))


def _successors(seed: int, order: int, symbols: int) -> np.ndarray:
  """Returns [contexts, 16], the next symbol for each draw of four bits."""
  contexts = symbols**order
  keys = draws(seed, _TABLE, contexts * symbols).reshape(contexts, symbols)
  # Sorting random keys shuffles the alphabet; ties go by position.
  shuffled = np.argsort(keys, axis=1, kind='stable')[:, : len(CHANCES)]
  return np.repeat(shuffled, CHANCES, axis=1)


def _walk(seed: int, length: int, order: int, symbols: int) -> bytes:
  contexts = symbols**order
  table = _successors(seed, order, symbols).reshape(-1).tolist()
  nibbles = (draws(seed, _WALK, length) >> np.uint64(60)).tolist()
  text = np.empty(length, np.uint8)
  context = 0
  for i, nibble in enumerate(nibbles):
    symbol = table[context * 16 + nibble]
    context = (context * symbols + symbol) % contexts
    text[i] = symbol
  letters = np.frombuffer(ALPHABET.encode(), np.uint8)
  return letters[text].tobytes()


def _check(seed: int, nbytes: int, order: int, symbols: int):
  if not 0 <= seed < 1 << 32:
    raise ValueError(f'grammar: seed={seed}, must be from 0 to 2^32 - 1')
  if nbytes < 2:
    raise ValueError(f'grammar: nbytes={nbytes}, must be at least 2')
  if not 1 <= order <= ORDER_MAX:
    raise ValueError(f'grammar: order={order}, must be from 1 to {ORDER_MAX}')
  if not len(CHANCES) <= symbols <= len(ALPHABET):
    raise ValueError(
      f'grammar: symbols={symbols}, must be from {len(CHANCES)} to '
      f'{len(ALPHABET)}'
    )
  if symbols**order > CONTEXTS_MAX:
    raise ValueError(
      f'grammar: symbols={symbols} to the order={order} are '
      f'{symbols**order} contexts, the limit is {CONTEXTS_MAX}'
    )
