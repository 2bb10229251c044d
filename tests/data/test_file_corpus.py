# SPDX-License-Identifier: Apache-2.0
"""Documents in files of every format: windows, shards, resumption, refusals."""

import collections
import contextlib
import os
import resource
import sys

import numpy as np
import pytest

from diloco.data import parquet_files, pipeline, text_windows
from diloco.data.corpus import file_corpus, heldout_documents
from diloco.data.documents import Mixture, allow_open
from diloco.data.records_folder import write_records
from diloco.data.sources import MixtureSource
from diloco.data.tokenizers import BYTES, make_tokenizer
from tests.data import made_files

TEXTS = made_files.texts()
SEQ_LEN, BATCH, SHARDS = 32, 4, 2
FORMATS = (
  *('array_record', 'example', 'tokens', 'parquet', 'jsonl', 'arrow', 'mix'),
)


@pytest.fixture(scope='module')
def sources(tmp_path_factory):
  """Returns sources by name, each with the tokenizer it is read with."""
  root = tmp_path_factory.mktemp('files')
  version = made_files.examples(root / 'toy', TEXTS)
  pieces = make_tokenizer(made_files.tokenizers_json(root / 'json', TEXTS))
  documents = (text.encode() for text in TEXTS if text)
  write_records(root / 'tokens', 3, documents, pieces)
  records = made_files.array_records(root / 'records', TEXTS)
  parquet = made_files.parquet(root / 'parquet', made_files.texts(seed=1))
  rows = [{'id': i, 'text': text} for i, text in enumerate(TEXTS)]
  lines = made_files.json_lines(root / 'jsonl', rows)
  arrow = made_files.arrow(root / 'arrow', rows[::-1])
  ours = MixtureSource('array_record', str(records), '')
  theirs = MixtureSource('parquet', str(parquet), 'text')
  examples = f'{version}/toy-train.array_record*'
  return {
    'array_record': ([ours], BYTES),
    'example': ([MixtureSource('array_record', examples, 'text')], BYTES),
    'tokens': (
      [MixtureSource('array_record', str(root / 'tokens'), '')],
      pieces,
    ),
    'parquet': ([theirs], pieces),
    'jsonl': ([MixtureSource('jsonl', str(lines), 'text')], BYTES),
    'arrow': ([MixtureSource('arrow', str(arrow), 'text')], BYTES),
    'mix': (
      [
        MixtureSource('array_record', str(records), '', 3.0),
        MixtureSource('parquet', str(parquet), 'text', 1.0),
      ],
      BYTES,
    ),
  }


@pytest.fixture(scope='module')
def load(sources, tmp_path_factory):
  folder = tmp_path_factory.mktemp('indices')

  def load(name, heldout=None, percent=8.0, say=lambda line: None):
    files, tokenizer = sources[name]
    return file_corpus(files, heldout, percent, tokenizer, str(folder), say)

  return load


def _dataset(corpus, shard=0, shards=SHARDS, seed=0):
  return pipeline.make_dataset(corpus.train, SEQ_LEN, shards, shard, seed)


def _streams(tokens):
  return tokens.streams if isinstance(tokens, Mixture) else (tokens,)


def _windows(tokens):
  """Every window of every stream, as bytes."""
  for stream in _streams(tokens):
    whole = stream[: len(stream)]
    for i in range(text_windows.windows_in(stream, SEQ_LEN)):
      yield whole[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].tobytes()


def _rows(dataset, count):
  return [dataset[i][0].tobytes() for i in range(count)]


@pytest.mark.parametrize('name', FORMATS)
def test_documents_are_trained_on_or_held_out(load, sources, name):
  corpus = load(name)
  train, heldout = (
    [token for stream in _streams(part) for token in stream[: len(stream)]]
    for part in (corpus.train, corpus.heldout)
  )
  texts = TEXTS[: -len(TEXTS) // 8] if name == 'example' else TEXTS
  if name == 'parquet':
    texts = made_files.texts(seed=1)
  if name == 'mix':
    texts = [*TEXTS, *made_files.texts(seed=1)]
  documents = corpus.tokenizer.encode([text.encode() for text in texts])
  both = np.concatenate(documents)
  assert len(train) + len(heldout) == len(both)
  np.testing.assert_array_equal(np.sort(train + heldout), np.sort(both))
  share = len(heldout) / len(both)
  assert 0.05 < share < 0.13
  assert heldout[-1] == train[-1] == corpus.tokenizer.end


@pytest.mark.parametrize('name', FORMATS)
def test_learners_get_windows_and_few_are_left_out(load, name):
  corpus = load(name)
  windows = collections.Counter(_windows(corpus.train))
  counts = collections.Counter()
  for stream in _streams(corpus.train):
    run = text_windows.run_of(stream, SEQ_LEN)
    taken = text_windows.Windows(stream, SEQ_LEN, run)
    counts.update(taken[i][0].tobytes() for i in range(len(taken)))
    assert text_windows.windows_in(stream, SEQ_LEN) - len(taken) < run
  assert counts <= windows
  for shard in range(SHARDS):
    dataset = _dataset(corpus, shard)
    for row in _rows(dataset, 60):
      assert row in counts


@pytest.mark.parametrize('name', FORMATS)
@pytest.mark.parametrize('start', [0, 1, 57, 400])
def test_the_number_of_rows_is_the_whole_state(load, name, start):
  """A process that begins at a row reads what the first would have."""
  before, after = load(name), load(name)
  expected = _rows(_dataset(before), start + 18)[start:]
  for threads, batch in ((1, 3), (3, 2), (1, 1)):
    batches = pipeline.batches(_dataset(after), start, batch, threads)
    with contextlib.closing(batches):
      found = [next(batches)['tokens'] for _ in range(18 // batch)]
    assert [x.tobytes() for x in np.concatenate(found)] == expected


def test_of_a_mix_rows_come_by_weight(load):
  corpus = load('mix')
  theirs = set(_windows(corpus.train.streams[1]))
  for learner in range(SHARDS):
    rows = _rows(_dataset(corpus, learner), pipeline.MIXED)
    share = sum(row in theirs for row in rows) / len(rows)
    assert share == pytest.approx(0.25, abs=0.04), learner


def test_of_a_mix_held_out_rows_come_by_weight(load):
  corpus = load('mix')
  batches = text_windows.heldout_batches(corpus.heldout, SEQ_LEN, 4, 5)
  rows = [row.tobytes() for batch in batches for row in batch['tokens']]
  ours, theirs = (set(_windows(each)) for each in corpus.heldout.streams)
  assert [row in ours for row in rows] == [True] * 15 + [False] * 5
  assert all(row in theirs for row in rows[15:])
  assert len(set(rows)) == 20


def test_an_epoch_of_a_parquet_reads_each_group_about_once(
  load, sources, monkeypatch
):
  """A row would cost a row group otherwise; few are held at a time."""
  import pyarrow.parquet as pq

  corpus = load('parquet')
  stream = corpus.train
  run = text_windows.run_of(stream, SEQ_LEN)
  groups = sum(span.file.groups for span in stream._spans)
  assert run > 1
  reads, read = [], pq.ParquetFile.read_row_group

  def counted(self, number, columns):
    reads.append(number)
    assert columns == ['text']
    return read(self, number, columns)

  monkeypatch.setattr(pq.ParquetFile, 'read_row_group', counted)
  dataset = _dataset(corpus, shards=1)
  windows = len(text_windows.Windows(stream, SEQ_LEN, run))
  _rows(dataset, windows)
  assert groups > 1.4 * parquet_files.GROUPS_KEPT
  assert len(reads) < 3 * groups < windows / 2


# Fingerprints ----------------------------------------------------------------


def test_the_fingerprint_is_of_tokens_not_of_places(load, sources, tmp_path):
  corpora = [load(name) for name in FORMATS]
  assert len({corpus.fingerprint for corpus in corpora}) == len(FORMATS)
  copy = made_files.array_records(tmp_path / 'elsewhere', TEXTS)
  args = (None, 8.0, BYTES, str(tmp_path), print)
  same = file_corpus([MixtureSource('array_record', str(copy), '')], *args)
  assert same.fingerprint == load('array_record').fingerprint
  other = made_files.array_records(tmp_path / 'other', [*TEXTS[1:], 'x'])
  changed = file_corpus([MixtureSource('array_record', str(other), '')], *args)
  assert changed.fingerprint != same.fingerprint


def test_the_fingerprint_sees_what_is_held_out_and_the_weights(load, sources):
  base = load('array_record')
  assert load('array_record', percent=9.0).fingerprint != base.fingerprint
  held = MixtureSource('array_record', sources['array_record'][0][0].path, '')
  assert load('array_record', held).fingerprint != base.fingerprint
  [ours, theirs], _ = sources['mix']
  turned = [theirs, ours]
  sources['turned'] = (turned, BYTES)
  assert load('turned').fingerprint != load('mix').fingerprint


def test_documents_of_another_path_can_be_held_out(load, sources):
  [source], _ = sources['example']
  held = source.path.replace('-train', '-validation')
  corpus = load('example', MixtureSource('array_record', held, 'text'))
  cut = len(TEXTS) - len(TEXTS) // 8
  for part, texts in (
    (corpus.train, TEXTS[:cut]),
    (corpus.heldout, TEXTS[cut:]),
  ):
    files = [texts[i::2] for i in range(2)]
    documents = [t.encode() for file in files for t in file]
    expected = np.concatenate(BYTES.encode(documents))
    np.testing.assert_array_equal(part[: len(part)], expected)


def test_the_last_documents_of_a_file_are_held_out():
  assert heldout_documents(1000, 1.0) == 10
  assert heldout_documents(3, 1.0) == 1
  assert heldout_documents(1, 1.0) == 0
  assert heldout_documents(1, 100.0) == 1
  assert heldout_documents(1000, 0.0) == 0


# Open files ------------------------------------------------------------------


@pytest.fixture
def few_files():
  """Lowers the limit of open files to few more than are open."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  used = max(map(int, os.listdir('/proc/self/fd')))
  with contextlib.ExitStack() as between:  # Numbers below it that are free.
    while between.enter_context(open(os.devnull)).fileno() < used:
      pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(sys.platform != 'linux', reason='counts files by /proc')
def test_as_many_files_stay_open_as_there_are(tmp_path, few_files):
  folder = made_files.array_records(tmp_path / 'records', TEXTS, files=40)
  source = MixtureSource('array_record', str(folder), '')
  corpus = file_corpus([source], None, 8.0, BYTES, str(tmp_path / 'i'), print)
  assert len(corpus.train[: len(corpus.train)]) == len(corpus.train)
  assert sum(
    'array_record' in os.readlink(link.path)
    for link in os.scandir('/proc/self/fd')
    if os.path.lexists(link.path)
  ) >= 40  # fmt: skip


def test_more_files_than_the_machine_allows(monkeypatch):
  monkeypatch.setattr(resource, 'getrlimit', lambda _: (100, 200))
  with pytest.raises(ValueError, match=r'101 files would .* have 200 in all'):
    allow_open(101)


# Refusals --------------------------------------------------------------------


def _refused(tmp_path, source, tokenizer=BYTES):
  with pytest.raises((ValueError, FileNotFoundError)) as caught:
    file_corpus([source], None, 8.0, tokenizer, str(tmp_path / 'i'), print)
  return str(caught.value)


@pytest.mark.parametrize('format_', ['array_record', 'parquet'])
def test_nothing_is_there(tmp_path, format_):
  said = _refused(
    tmp_path, MixtureSource(format_, str(tmp_path / 'no'), 'text')
  )
  assert str(tmp_path / 'no') in said


@pytest.mark.parametrize('format_', ['array_record', 'parquet'])
def test_a_file_of_something_else(tmp_path, format_):
  path = tmp_path / 'file'
  path.write_text('something else')
  said = _refused(tmp_path, MixtureSource(format_, str(path), 'text'))
  assert said.startswith(f'{path}: is no ')


def test_another_column_is_wanted(tmp_path):
  folder = made_files.parquet(tmp_path / 'parquet', TEXTS)
  said = _refused(tmp_path, MixtureSource('parquet', str(folder), 'body'))
  assert "no column data.text_key='body', those there are: id, text" in said
  said = _refused(tmp_path, MixtureSource('parquet', str(folder), 'id'))
  assert "column data.text_key='id' is of int64, must be text" in said


def test_another_feature_is_wanted(tmp_path):
  version = made_files.examples(tmp_path / 'toy', TEXTS)
  examples = f'{version}/toy-train*'
  said = _refused(tmp_path, MixtureSource('array_record', examples, 'body'))
  assert "no feature 'body' of bytes; those there are: text, url" in said


def test_a_text_that_is_no_example(tmp_path):
  folder = made_files.array_records(tmp_path / 'records', TEXTS)
  said = _refused(tmp_path, MixtureSource('array_record', str(folder), 'text'))
  assert 'text-0.array_record: a record ' in said
  assert "data.text_key='text' names" in said


def test_tokens_of_another_tokenizer(sources, tmp_path):
  [source], _ = sources['tokens']
  said = _refused(tmp_path, source, BYTES)
  assert "its tokens are not those of data.tokenizer='bytes'" in said


def test_a_document_that_is_no_unicode(sources, tmp_path):
  path = tmp_path / 'records'
  made_files.write_records(path, [b'one', b'two \xff'])
  _, pieces = sources['tokens']
  said = _refused(
    tmp_path, MixtureSource('array_record', str(path), ''), pieces
  )
  assert said.startswith(f'{path}: a document is not UTF-8')


def test_a_missing_package(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  said = _refused(tmp_path, MixtureSource('parquet', str(tmp_path), 'text'))
  assert "data.source='parquet' needs pyarrow" in said
  assert "pip install 'diloco[data]'" in said
