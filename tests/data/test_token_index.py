# SPDX-License-Identifier: Apache-2.0
"""An index is built once, by one process, and again where a file changed."""

import os

import numpy as np
import pytest

from diloco.data import array_records, documents
from diloco.data.documents import load_or_build
from diloco.data.records_folder import write_records
from diloco.data.tokenizers import BYTES, make_tokenizer
from tests.data import made_files

TEXTS = made_files.texts(50)


@pytest.fixture
def folder(tmp_path):
  return made_files.array_records(tmp_path / 'records', TEXTS, files=2)


def _load(folder, tmp_path, tokenizer=BYTES):
  """The indices, and what was built for them."""
  said = []
  files = array_records.open_files(str(folder), '')
  indices = load_or_build(files, tokenizer, str(tmp_path / 'i'), said.append)
  return indices, [line.rpartition('/')[2] for line in said]


def test_it_says_where_each_document_begins(folder, tmp_path):
  indices, _ = _load(folder, tmp_path)
  for i, index in enumerate(indices):
    texts = [text.encode() for text in TEXTS[i::2]]
    sizes = [len(tokens) for tokens in BYTES.encode(texts)]
    np.testing.assert_array_equal(index.offsets, np.cumsum([0, *sizes]))
    assert index.text_bytes == sum(map(len, texts))
    assert isinstance(index.offsets, np.memmap)  # However many there are.


def test_it_is_built_once(folder, tmp_path):
  first, built = _load(folder, tmp_path)
  assert built == ['text-0.array_record', 'text-1.array_record']
  again, built = _load(folder, tmp_path)
  assert not built
  assert [i.digest for i in again] == [i.digest for i in first]


def test_a_file_that_changed_is_indexed_again(folder, tmp_path):
  first, _ = _load(folder, tmp_path)
  made_files.write_records(folder / 'text-1.array_record', [b'new'])
  again, built = _load(folder, tmp_path)
  assert built == ['text-1.array_record']
  assert again[0].digest == first[0].digest
  assert again[1].digest != first[1].digest


def test_what_a_dead_process_left_is_no_index(folder, tmp_path):
  """The file of the meaning comes last; whatever is there without it."""
  _load(folder, tmp_path)
  for meaning in (tmp_path / 'i').glob(f'*{documents.MEANING}'):
    meaning.unlink()
  (tmp_path / 'i' / 'x.tokens.npy.1.partial').write_bytes(b'half')
  assert len(_load(folder, tmp_path)[1]) == 2


def test_who_comes_second_waits_for_the_first(folder, tmp_path):
  """A file that another process is indexing is left for last."""
  files = array_records.open_files(str(folder), '')
  root = tmp_path / 'i'
  root.mkdir()
  place = documents._place(files[0], BYTES, root)
  held = documents.locked(root / f'{place[1]}.lock', wait=True)
  said = []

  def say(line):
    """The first has done its part by the time the second is at the other."""
    said.append(line)
    if len(said) == 1:
      for _ in documents._build(files[0], BYTES, *place):
        pass
      held.__exit__(None, None, None)

  assert held.__enter__()
  with documents.locked(root / f'{place[1]}.lock', wait=False) as mine:
    assert not mine
  load_or_build(files, BYTES, str(root), say)
  assert [line.rpartition('/')[2] for line in said] == ['text-1.array_record']


@pytest.mark.parametrize('content', ['{}', 'no json', '[]'])
def test_a_broken_index_is_named(folder, tmp_path, content):
  _load(folder, tmp_path)
  broken = next((tmp_path / 'i').glob(f'*{documents.MEANING}'))
  broken.write_text(content)
  with pytest.raises(ValueError, match=f'{broken}: is no index of .*delete it'):
    _load(folder, tmp_path)


def test_a_folder_that_can_not_be_written(folder, tmp_path):
  (tmp_path / 'i').write_text('a file')
  with pytest.raises(ValueError, match=r'data\.index_path=.* can not be writt'):
    _load(folder, tmp_path)


def test_written_tokens_bring_their_index_along(tmp_path):
  tokenizer = make_tokenizer(made_files.tokenizers_json(tmp_path / 'r', TEXTS))
  documents = [text.encode() for text in TEXTS if text]
  write_records(tmp_path / 'tokens', 2, documents, tokenizer)
  theirs, built = _load(tmp_path / 'tokens', tmp_path, tokenizer)
  assert not built
  for path in (tmp_path / 'tokens').glob('*.tokens.*'):
    os.unlink(path)
  ours, built = _load(tmp_path / 'tokens', tmp_path, tokenizer)
  assert len(built) == 2
  for one, other in zip(theirs, ours):
    np.testing.assert_array_equal(one.offsets, other.offsets)
    assert one.digest == other.digest
    assert one.text_bytes == other.text_bytes
