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


def test_entropy_rate_is_that_of_the_chances():
  assert sum(corpus.CHANCES) == 16
  assert math.isclose(corpus.ENTROPY_RATE, 1.875 * math.log(2))


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


def test_seeds_are_languages():
  first, again, other = (
    corpus.grammar_corpus(seed, 5000).fingerprint for seed in (1, 1, 2)
  )
  assert first == again != other


def test_longer_text_goes_on_where_the_shorter_ends():
  short = corpus.grammar_corpus(1, 3000).train
  long = corpus.grammar_corpus(1, 5000).train
  np.testing.assert_array_equal(long[:3000], short)


@pytest.mark.parametrize(
  ('change', 'text'),
  [
    ({'seed': -1}, 'seed=-1, must be from 0'),
    ({'nbytes': 1}, 'nbytes=1, must be at least 2'),
    ({'order': 0}, 'order=0, must be from 1 to 4'),
    ({'symbols': 4}, 'symbols=4, must be from 5 to 52'),
    ({'symbols': 50, 'order': 4}, '6250000 contexts, the limit is 1048576'),
  ],
)
def test_a_wrong_argument_is_refused(change, text):
  with pytest.raises(ValueError, match=text):
    corpus.grammar_corpus(**{'seed': 0, 'nbytes': 100, **change})
