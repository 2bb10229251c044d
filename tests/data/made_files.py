# SPDX-License-Identifier: Apache-2.0
"""Small files of documents, and tokenizers for them, made by the tests."""

import io
import json
import pathlib
import random
from collections.abc import Sequence

from array_record.python import array_record_module

VOCAB = 300  # At least that of every tokenizer here.


def texts(count: int = 400, seed: int = 0) -> list[str]:
  """Documents of up to 60 words of a small language; some are empty."""
  rng = random.Random(seed)
  words = [
    ''.join(rng.choices('abcdefghij', k=rng.randint(2, 7))) for _ in range(90)
  ]
  words += ['naïve', 'größer', '語']
  return [
    ' '.join(rng.choices(words, k=rng.randint(0, 60))) for _ in range(count)
  ]


def write_records(path: pathlib.Path, records: Sequence[bytes]):
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for record in records:
    writer.write(record)
  writer.close()


def array_records(folder: pathlib.Path, documents: Sequence[str], files=3):
  """A record is a text."""
  folder.mkdir()
  for i in range(files):
    records = [text.encode() for text in documents[i::files]]
    write_records(folder / f'text-{i}.array_record', records)
  return folder


def parquet(folder: pathlib.Path, documents: Sequence[str], rows=23, files=2):
  """Writes a column beside that of the text, in groups of so many rows."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  folder.mkdir()
  for i in range(files):
    part = documents[i::files]
    table = pa.table({'id': list(range(len(part))), 'text': part})
    pq.write_table(table, folder / f'text-{i}.parquet', row_group_size=rows)
  return folder


def json_lines(folder: pathlib.Path, records: Sequence[dict], files=2):
  """An empty line in between, and none at the end."""
  folder.mkdir()
  for i in range(files):
    lines = [json.dumps(each) for each in records[i::files]]
    lines.insert(1, '')
    (folder / f'part-{i}.jsonl').write_text('\n'.join(lines))
  return folder


def arrow(folder: pathlib.Path, records: Sequence[dict], files=2):
  """As `datasets` writes it: streams of Arrow, in batches of 50 rows."""
  import pyarrow as pa

  folder.mkdir()
  for i in range(files):
    table = pa.Table.from_pylist(list(records[i::files]))
    name = f'data-{i:05d}-of-{files:05d}.arrow'
    with pa.ipc.new_stream(folder / name, table.schema) as stream:
      stream.write_table(table, max_chunksize=50)
  (folder / 'state.json').write_text('{"_indices_files": null}')
  (folder / 'dataset_info.json').write_text('{}')
  return folder


def examples(folder: pathlib.Path, documents: Sequence[str], files=2):
  """Files as of TFDS, toy-SPLIT.array_record…; an eighth is 'validation'."""
  folder.mkdir()
  cut = len(documents) - len(documents) // 8
  splits = {'train': documents[:cut], 'validation': documents[cut:]}
  for split, texts_ in splits.items():
    for i in range(files):
      records = [
        _example({'text': text, 'url': f'u{k}'})
        for k, text in enumerate(texts_[i::files])
      ]
      name = f'toy-{split}.array_record-{i:05d}-of-{files:05d}'
      write_records(folder / name, records)
  return folder


def _example(features: dict[str, str]) -> bytes:
  """A tf.train.Example as protobuf: entries of a map from name to bytes."""
  entries = (
    _field(1, name.encode()) + _field(2, _field(1, _field(1, text.encode())))
    for name, text in features.items()
  )
  return _field(1, b''.join(_field(1, entry) for entry in entries))


def _field(number: int, content: bytes) -> bytes:
  size, left = bytearray(), len(content)
  while left > 0x7F:
    size.append(left & 0x7F | 0x80)
    left >>= 7
  return bytes([number << 3 | 2, *size, left]) + content


def sentencepiece_model(path: pathlib.Path, documents: Sequence[str]) -> str:
  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(documents),
    model_writer=model,
    vocab_size=110,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  path.write_bytes(model.getvalue())
  return f'sentencepiece:{path}'


def tokenizers_json(path: pathlib.Path, documents: Sequence[str]) -> str:
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB,
    special_tokens=['<|endoftext|>'],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(documents, trainer)
  tokenizer.save(str(path))
  return f'tokenizers:{path}'
