# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of every kind: there and back, ends, fingerprints, refusals."""

import pathlib
import sys

import numpy as np
import pytest

from diloco.data.tokenizers import make_tokenizer
from tests.data import made_files

TEXTS = made_files.texts()
MADE = {
  'sentencepiece': made_files.sentencepiece_model,
  'tokenizers': made_files.tokenizers_json,
}
KINDS = sorted(MADE)


@pytest.fixture(scope='module')
def names(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizers')
  made = {kind: make(folder / kind, TEXTS) for kind, make in MADE.items()}
  return {'bytes': 'bytes', **made}


@pytest.mark.parametrize('kind', ['bytes', *KINDS])
def test_texts_come_back(names, kind):
  tokenizer = make_tokenizer(names[kind])
  texts = [text.encode() for text in TEXTS]
  for text, tokens in zip(texts, tokenizer.encode(texts)):
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens) == text
    if text:
      assert tokens[-1] == tokenizer.end
      assert tokenizer.end not in tokens[:-1]
      assert 0 <= tokens.min() <= tokens.max() < tokenizer.vocab
    else:
      assert len(tokens) == 0


@pytest.mark.parametrize('kind', ['bytes', 'tokenizers'])
def test_an_exported_tokenizer_gives_the_same_tokens(names, kind):
  import tokenizers

  ours = make_tokenizer(names[kind])
  name, content = ours.exported
  assert name == 'tokenizer.json'
  theirs = tokenizers.Tokenizer.from_buffer(content)
  for text in [*TEXTS, 'größer\n\n \t zwei\x00\x7f\xa0\xad Ā€ 😀']:
    [tokens] = ours.encode([text.encode()])
    assert theirs.encode(text).ids == tokens[:-1].tolist(), text
    assert theirs.decode(tokens[:-1], skip_special_tokens=False) == text
  # Tools look for an end token by its name, and leave it out of a text.
  assert theirs.token_to_id(ours.end_text) == ours.end
  drawn = [*theirs.encode('ab').ids, ours.end]
  assert theirs.decode(drawn, skip_special_tokens=True) == 'ab'


def test_a_model_of_sentencepiece_is_exported_as_it_is(names):
  import sentencepiece

  ours = make_tokenizer(names['sentencepiece'])
  name, content = ours.exported
  assert name == 'tokenizer.model'
  theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
  assert theirs.piece_to_id(ours.end_text) == ours.end


def test_the_end_is_but_text_in_a_text(names):
  """The end token's text inside a document does not end it."""
  tokenizer = make_tokenizer(names['tokenizers'])
  [tokens] = tokenizer.encode([b'a <|endoftext|> b'])
  assert list(tokens).count(tokenizer.end) == 1
  assert tokenizer.decode(tokens) == b'a <|endoftext|> b'


def test_fingerprints_are_of_contents_not_of_places(names, tmp_path):
  prints = {make_tokenizer(name).fingerprint for name in names.values()}
  assert len(prints) == len(names)
  for kind in KINDS:
    path = pathlib.Path(names[kind].partition(':')[2])
    copy = tmp_path / f'{kind}-copy'
    copy.write_bytes(path.read_bytes())
    assert make_tokenizer(f'{kind}:{copy}').fingerprint in prints
    other = MADE[kind](tmp_path / f'{kind}-other', made_files.texts(seed=5))
    assert make_tokenizer(other).fingerprint not in prints


@pytest.mark.parametrize(
  ('kind', 'token'), [('sentencepiece', '<s>'), ('tokenizers', 'e')]
)
def test_another_end_is_another_fingerprint(names, kind, token):
  usual, other = make_tokenizer(names[kind]), make_tokenizer(names[kind], token)
  assert other.end != usual.end
  assert other.fingerprint != usual.fingerprint


@pytest.mark.parametrize('kind', ['sentencepiece', 'tokenizers'])
def test_an_end_that_is_no_token(names, kind):
  with pytest.raises(ValueError, match=r"data\.end_token='<nope>': .*has no"):
    make_tokenizer(names[kind], '<nope>')


def test_a_json_file_that_has_no_end(names, tmp_path):
  text = pathlib.Path(names['tokenizers'].partition(':')[2]).read_text()
  path = tmp_path / 'endless.json'
  path.write_text(text.replace('<|endoftext|>', '<|odd|>'))
  with pytest.raises(ValueError, match='no token that ends a document'):
    make_tokenizer(f'tokenizers:{path}')
  assert make_tokenizer(f'tokenizers:{path}', '<|odd|>').end == 0


@pytest.mark.parametrize('kind', KINDS)
def test_a_file_of_something_else(kind, tmp_path):
  path = tmp_path / 'odd'
  path.write_bytes(b'no such thing\n')
  with pytest.raises(ValueError, match=f'{path}.*: no file of {kind}'):
    make_tokenizer(f'{kind}:{path}')
  with pytest.raises(FileNotFoundError, match="no file '/no/such'"):
    make_tokenizer(f'{kind}:/no/such')


@pytest.mark.parametrize('kind', KINDS)
def test_a_missing_package_is_named_with_its_extra(names, kind, monkeypatch):
  monkeypatch.setitem(sys.modules, kind, None)
  with pytest.raises(ValueError, match=rf"{kind}.*install 'diloco\[data\]'"):
    make_tokenizer(names[kind])
