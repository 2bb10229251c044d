# SPDX-License-Identifier: Apache-2.0
"""Files by path, folder and pattern; URLs take a way of their own.

No test has a bucket: what a URL would do, local paths do here by the same
libraries.
"""

import os

import numpy as np
import pytest

from diloco.data import paths
from diloco.data.corpus import file_corpus
from diloco.data.records_folder import write_records
from diloco.data.sources import MixtureSource
from diloco.data.tokenizers import BYTES
from tests.data import made_files

TEXTS = made_files.texts(200)


@pytest.fixture
def folder(tmp_path):
  for name in ('b.x', 'a.x', 'c.y'):
    (tmp_path / name).write_text(name)
  (tmp_path / 'd.x').mkdir()
  return tmp_path


def _names(found):
  assert all(os.path.isabs(path) for path in found)
  return [os.path.basename(path) for path in found]


@pytest.fixture(params=[False, True], ids=['path', 'url'])
def is_url(request, monkeypatch):
  monkeypatch.setattr(paths, 'is_remote', lambda path: request.param)
  return request.param


def test_a_folder_has_the_files_that_fit(folder, is_url):
  found = paths.find(f'{folder}/', ('*.x', '*.z'))
  assert _names(found)[:2] == ['a.x', 'b.x']


def test_a_file_and_a_pattern(folder, is_url):
  assert _names(paths.find(f'{folder}/c.y', ('*.x',))) == ['c.y']
  assert _names(paths.find(f'{folder}/[ac].?', ('*.q',))) == ['a.x', 'c.y']


@pytest.mark.parametrize('path', ['none', 'none*', ''])
def test_what_is_not_there_is_named(folder, is_url, path):
  with pytest.raises(FileNotFoundError, match=r'nor a folder with files \*\.q'):
    paths.find(f'{folder}/{path}', ('*.q',))


def test_a_name_that_looks_like_a_pattern(tmp_path):
  (tmp_path / 'a[1].x').write_text('')
  (tmp_path / 'a1.x').write_text('')
  assert _names(paths.find(f'{tmp_path}/a[1].x', ())) == ['a[1].x']


def test_a_stamp_changes_with_the_file(folder, is_url):
  before = paths.stamp(f'{folder}/a.x')
  assert paths.stamp(f'{folder}/a.x') == before
  (folder / 'a.x').write_text('longer than it was')
  assert paths.stamp(f'{folder}/a.x') != before


def test_a_url_of_an_unknown_kind():
  with pytest.raises(ValueError, match=r"'odd://a/b': nothing can be read"):
    paths.find('odd://a/b', ('*',))


def test_urls_are_read_to_the_same_tokens(tmp_path, monkeypatch):
  """An index that came with a file is copied: a remote one can't be mapped."""
  documents = [text.encode() for text in TEXTS if text]
  write_records(tmp_path / 'tokens', 2, documents, BYTES)
  made_files.parquet(tmp_path / 'parquet', TEXTS)
  for format_, name in (('array_record', 'tokens'), ('parquet', 'parquet')):
    corpora = []
    for remote in (False, True):
      monkeypatch.setattr(paths, 'is_remote', lambda _, remote=remote: remote)
      index_path = tmp_path / f'{name}-{remote}'
      source = MixtureSource(format_, str(tmp_path / name), 'text')
      said = []
      corpora.append(
        file_corpus([source], None, 5.0, BYTES, str(index_path), said.append)
      )
      assert bool(said) == (format_ == 'parquet')
    local, url = corpora
    assert url.fingerprint == local.fingerprint
    np.testing.assert_array_equal(
      url.train[: len(url.train)], local.train[: len(local.train)]
    )
