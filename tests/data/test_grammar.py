# SPDX-License-Identifier: Apache-2.0
"""The grammar: the same bytes everywhere, and as random as it says."""

import collections
import hashlib
import itertools
import math

import numpy as np
import pytest

from diloco.data import corpus


def test_bytes_are_the_same_on_every_machine():
  made = corpus.grammar_corpus(seed=0, nbytes=1 << 20)
  assert made.train[:40].tobytes() == (
    b'eddekigbfpeblhgcakoopmifgidgepenhgnmkkal'
  )
  assert made.fingerprint == (
    'd527c745c64c9de3add40af2a9ea966bd5ea15233166c6a8663d5b3c47e70a48'
  ), 'The language changed: results with it can no longer be compared.'


def test_draws_equal_plain_integer_arithmetic():
  mask = (1 << 64) - 1

  def mixed(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31

  start = mixed(5 << 32 | 1)
  expected = [mixed(start + i * 0x9E3779B97F4A7C15 & mask) for i in (1, 2, 3)]
  assert corpus.draws(5, 1, 3).tolist() == expected


@pytest.mark.parametrize('seed', [0, 1, 4294967295])
def test_text_is_as_random_as_the_floor_says(seed):
  # A plug-in estimate on trigrams; 256 contexts × 5 are well known by 400 kB.
  text = corpus.grammar_corpus(seed, 400_000).train.tobytes()
  contexts = collections.Counter(itertools.pairwise(text[:-1]))
  trigrams = collections.Counter(zip(text, text[1:], text[2:]))
  total = sum(trigrams.values())
  entropy = -sum(
    count / total * math.log(count / contexts[a, b])
    for (a, b, _), count in trigrams.items()
  )
  np.testing.assert_allclose(entropy, corpus.ENTROPY_RATE, rtol=0.005)


def test_held_out_text_speaks_the_same_language():
  made = corpus.grammar_corpus(3, 200_000)
  words = [
    {text[i : i + 3] for i in range(len(text) - 2)}
    for text in (made.train.tobytes(), made.heldout.tobytes())
  ]
  assert len(words[0]) <= 16 * 16 * 5
  assert len(words[1] - words[0]) <= 2
  assert (
    hashlib.sha256(made.heldout).digest()
    != hashlib.sha256(made.train[: len(made.heldout)]).digest()
  )
