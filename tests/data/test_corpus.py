# SPDX-License-Identifier: Apache-2.0
"""Corpora: what is in them, what is held out, what bigrams say of them."""

import collections
import itertools
import math
import pathlib
import sysconfig

import numpy as np
import pytest

from diloco.data import corpus


@pytest.fixture(scope='module')
def stdlib():
  return corpus.stdlib_corpus()


def _library(root, files):
  for path, text in files.items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
  return root


def test_stdlib_takes_the_library_and_nothing_else(tmp_path):
  root = _library(
    tmp_path,
    {
      'b.py': 'bb',
      'a/c.py': 'cc',
      'a/notes.txt': 'no',
      'a/test/x.py': 'no',
      'a/tests/x.py': 'no',
      'idlelib/idle_test/x.py': 'no',
      'site-packages/x.py': 'no',
      'dist-packages/x.py': 'no',
      '_sysconfigdata__linux.py': 'no',
      'sitecustomize.py': 'no',
    },
  )
  assert corpus.stdlib_paths(root) == ['a/c.py', 'b.py']


def test_held_out_files_are_not_trained_on(stdlib):
  root = pathlib.Path(sysconfig.get_path('stdlib'))
  paths = corpus.stdlib_paths(root)
  train, heldout = stdlib.train.tobytes(), stdlib.heldout.tobytes()
  held = [path for path in paths if corpus.is_heldout(path, 4)]
  assert 0.02 < len(held) / len(paths) < 0.08
  long = [(path, (root / path).read_bytes()) for path in held]
  long = [(path, text) for path, text in long if len(text) > 2000]
  for path, text in long:
    assert text in heldout, path
    assert text not in train, path


def test_held_out_is_a_function_of_the_path_alone(tmp_path):
  files = {f'{name}.py': f'text of {name}, ' * 9 for name in range(200)}
  before = corpus.stdlib_corpus(_library(tmp_path / 'a', files), 20)
  del files['7.py']
  after = corpus.stdlib_corpus(_library(tmp_path / 'b', files), 20)
  parts = [set(c.heldout.tobytes().split(b'\0')) for c in (before, after)]
  assert parts[0] ^ parts[1] <= {b'text of 7, ' * 9}


def test_an_embedded_python_is_told_what_to_do(tmp_path):
  with pytest.raises(FileNotFoundError, match='train on the grammar or on a'):
    corpus.stdlib_corpus(tmp_path)


def test_fingerprint_is_a_constant_of_the_content():
  golden = 'e741f49b053848127dce6efa122c19ea9a1dbdd2520e50883d80541541af873c'
  made = corpus.make_corpus('any name', b'train text', b'held-out text')
  assert made.fingerprint == golden, (
    'Learners of two versions would refuse each other; if that is meant, '
    'raise the protocol version and put the new value here.'
  )


@pytest.mark.parametrize(
  ('train', 'heldout'),
  [
    (b'train texT', b'held-out text'),
    (b'train text', b'held-out texT'),
    (b'train texth', b'eld-out text'),  # The same bytes, cut elsewhere.
  ],
)
def test_fingerprint_sees_every_change(train, heldout):
  base = corpus.make_corpus('', b'train text', b'held-out text')
  assert corpus.make_corpus('', train, heldout).fingerprint != base.fingerprint


def test_text_holds_out_the_end_of_every_file(tmp_path):
  _library(tmp_path, {'b.txt': 'b' * 100, 'a/a.txt': 'a' * 50, 'c': 'c' * 50})
  made = corpus.text_corpus(tmp_path)
  assert made.train.tobytes() == b'a' * 48 + b'\0' + b'b' * 96
  assert made.heldout.tobytes() == b'aa' + b'\0' + b'bbbb'


def test_a_missing_text_is_named(tmp_path):
  missing = tmp_path / 'novel.txt'
  with pytest.raises(FileNotFoundError, match=r'no text at .*novel'):
    corpus.text_corpus(missing)
  with pytest.raises(FileNotFoundError, match=r"no file '\*.txt' in directory"):
    corpus.text_corpus(tmp_path)


def test_a_text_too_short_to_hold_out_is_refused(tmp_path):
  (tmp_path / 'a.txt').write_text('too short')
  with pytest.raises(ValueError, match='0 bytes of held-out text'):
    corpus.text_corpus(tmp_path)


def test_entropies_equal_a_reference_by_counting():
  train, heldout = b'the cat sat on the mat', b'a hat on that cat?'
  counts = collections.Counter(train)
  unigram = lambda b: (counts[b] + 1) / (len(train) + 256)  # noqa: E731
  pairs = collections.Counter(itertools.pairwise(train))
  firsts = collections.Counter(train[:-1])
  chances = [
    (pairs[a, b] + unigram(b)) / (firsts[a] + 1)
    for a, b in itertools.pairwise(heldout)
  ]
  arrays = [np.frombuffer(text, np.uint8) for text in (train, heldout)]
  np.testing.assert_allclose(
    corpus.bigram_entropy(*arrays), -np.mean(np.log(chances)), rtol=1e-12
  )
  np.testing.assert_allclose(
    corpus.unigram_entropy(*arrays),
    -np.mean([math.log(unigram(b)) for b in heldout]),
    rtol=1e-12,
  )


def test_stdlib_has_three_and_a_half_bits_per_bigram(stdlib):
  entropy = corpus.bigram_entropy(stdlib.train, stdlib.heldout)
  assert 2.3 < entropy < 2.55
  assert entropy < corpus.unigram_entropy(stdlib.train, stdlib.heldout) < 3.4
