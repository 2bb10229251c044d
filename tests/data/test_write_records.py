# SPDX-License-Identifier: Apache-2.0
"""Shards of text files: what is in them, and what is refused."""

import json

import numpy as np
import pytest

from diloco.data import array_records, records_folder
from diloco.data.paths import read_documents
from diloco.data.records_folder import read_contents, write_records
from diloco.data.tokenizers import BYTES, make_tokenizer
from tests.commands import output, refused
from tests.data import made_files

COMMAND = '-m', 'diloco.write_records'
TEXTS = [text for text in made_files.texts(50) if text]
DOCUMENTS = [text.encode() for text in TEXTS]


def _documents(folder):
  return [
    (file.dtype, file.read(0, file.count))
    for file in array_records.open_files(str(folder), 'text')
  ]


def test_documents_are_dealt_in_turn(tmp_path):
  contents = write_records(tmp_path / 'out', 3, iter(DOCUMENTS), None)
  assert contents == read_contents(str(tmp_path / 'out'))
  assert contents.documents == sum(contents.shards.values()) == len(DOCUMENTS)
  assert _documents(tmp_path / 'out') == [
    ('', DOCUMENTS[i::3]) for i in range(3)
  ]


def test_tokens_are_as_small_as_they_can_be(tmp_path):
  tokenizer = make_tokenizer(made_files.tokenizers_json(tmp_path / 'r', TEXTS))
  for each, dtype in ((BYTES, '|u1'), (tokenizer, '<u2')):
    folder = tmp_path / dtype.strip('<|')
    contents = write_records(folder, 1, DOCUMENTS, each)
    [(found, records)] = _documents(folder)
    assert found == contents.dtype == dtype
    tokens = [np.frombuffer(record, dtype) for record in records]
    assert contents.tokens == sum(map(len, tokens))
    for ours, theirs in zip(each.encode(DOCUMENTS), tokens, strict=True):
      np.testing.assert_array_equal(ours, theirs)
  assert records_folder.token_dtype(65536) == '<u2'
  assert records_folder.token_dtype(65537) == '<i4'


def test_many_documents_are_never_held_at_once(tmp_path, monkeypatch):
  monkeypatch.setattr(records_folder, 'TOKENISED_AT_ONCE_BYTES', 1000)
  held = []
  encode = BYTES.encode
  monkeypatch.setattr(
    type(BYTES),
    'encode',
    lambda _, t: held.append(sum(map(len, t))) or encode(t),
  )
  write_records(tmp_path / 'out', 2, DOCUMENTS, BYTES)
  assert len(held) > 5
  assert max(held) < 1000 + max(map(len, DOCUMENTS))


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
  def documents():
    yield from DOCUMENTS
    assert not (tmp_path / 'out').exists()
    raise ValueError('broken')

  with pytest.raises(ValueError, match='broken'):
    write_records(tmp_path / 'out', 2, documents(), None)
  assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
  (tmp_path / 'out').mkdir()
  write_records(tmp_path / 'out', 2, DOCUMENTS, None)
  before = {p: p.read_bytes() for p in (tmp_path / 'out').iterdir()}
  with pytest.raises(FileExistsError, match='is there already'):
    write_records(tmp_path / 'out', 1, DOCUMENTS, None)
  assert before == {p: p.read_bytes() for p in (tmp_path / 'out').iterdir()}


def test_each_shard_takes_a_document(tmp_path):
  with pytest.raises(ValueError, match='2 documents are too few for shards=3'):
    write_records(tmp_path / 'out', 3, DOCUMENTS[:2], None)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('content', ['{"format": 2}', '{"format": 1}', 'odd'])
def test_contents_of_another_kind_are_refused(tmp_path, content):
  (tmp_path / 'contents.json').write_text(content)
  with pytest.raises(ValueError, match='does not say what the records are'):
    read_contents(str(tmp_path))


# Text files ------------------------------------------------------------------


def test_what_a_document_is(tmp_path):
  one, two = tmp_path / 'one', tmp_path / 'two'
  one.write_text('a\n\nb\r\n')
  two.write_text('')
  files = [one, two]
  assert [*read_documents(files, 'file', '')] == [b'a\n\nb\r\n']
  assert [*read_documents(files, 'line', '')] == [b'a', b'b']
  two.write_text(''.join(json.dumps({'x': x}) + '\n' for x in ('ä\n', '', 'c')))
  assert [*read_documents([two], 'jsonl', 'x')] == ['ä\n'.encode(), b'c']


@pytest.mark.parametrize(
  ('content', 'kind', 'problem'),
  [
    (b'a\n\xff\n', 'line', 'line 2: .*utf-8'),
    (b'a\n\xff\n', 'file', 'line 1: .*utf-8'),
    (b'{"x": "a"}\n{"y": "a"}\n', 'jsonl', "line 2: has no 'x'"),
    (b'{"x": 1}\n', 'jsonl', "line 1: 'x' is a number, must"),
    (b'[]\n', 'jsonl', 'line 1: is a list, must be an object'),
    (b'odd\n', 'jsonl', 'line 1: is no JSON .Expecting value'),
  ],
)
def test_a_line_that_is_none(tmp_path, content, kind, problem):
  (tmp_path / 'text').write_bytes(content)
  with pytest.raises(ValueError, match=f'text, {problem}'):
    list(read_documents([tmp_path / 'text'], kind, 'x'))


# The command -----------------------------------------------------------------


def test_it_says_what_it_wrote(tmp_path):
  name = made_files.tokenizers_json(tmp_path / 'tokenizer.json', TEXTS)
  for i, text in enumerate(TEXTS):
    (tmp_path / f'{i:03d}.txt').write_text(text)
  flags = f'--out={tmp_path / "out"}', '--shards=2', f'--tokenizer={name}'
  said = output(*COMMAND, *flags, *sorted(tmp_path.glob('*.txt')))
  contents = read_contents(str(tmp_path / 'out'))
  shards = '\n'.join(
    f'{tmp_path / "out" / shard}: {count} documents'
    for shard, count in contents.shards.items()
  )
  assert said.startswith(shards + '\n')
  assert f'{contents.tokens:,} tokens as uint16' in said
  assert contents.text_bytes == sum(map(len, DOCUMENTS))


@pytest.mark.parametrize(
  ('arguments', 'problem'),
  [
    (('--out={}/out', '--shards=1'), 'FILES: there are none'),
    (('--out={}/out', '--shards=1', '{}/none'), '{}/none: there is no such'),
    (('--out={}/a/b', '--shards=1', '{}/text'), 'no folder to make it in'),
    (('--out={}', '--shards=1', '{}/text'), '{} is there already'),
    (('--out={}/out', '--shards=0', '{}/text'), '--shards=0'),
    (('--shards=1', '{}/text'), '--out'),
    (('--out={}/out', '--shards=1', '--end_token=x', '{}/text'), '--end_token'),
    (
      ('--out={}/out', '--shards=1', '--tokenizer=gpt:x', '{}/text'),
      "must be 'bytes', or 'KIND:PATH'",
    ),
  ],
)
def test_a_mistake_ends_in_78(tmp_path, arguments, problem):
  (tmp_path / 'text').write_text('a text')
  [line] = refused(*COMMAND, *(each.format(tmp_path) for each in arguments))
  assert line.startswith('error: ')
  assert problem.format(tmp_path) in line
  assert [path.name for path in tmp_path.iterdir()] == ['text']
