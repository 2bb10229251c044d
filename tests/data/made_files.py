# SPDX-License-Identifier: Apache-2.0
"""Small files of documents, and tokenizers for them, made by the tests."""

import base64
import io
import itertools
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


def tfds(folder: pathlib.Path, documents: Sequence[str], files=2):
  """A prepared dataset, toy/1.0.0, whose 'validation' is an eighth of it."""
  import tensorflow_datasets as tfds

  version = folder / 'toy' / '1.0.0'
  version.mkdir(parents=True)
  cut = len(documents) - len(documents) // 8
  splits = {'train': documents[:cut], 'validation': documents[cut:]}
  features = tfds.features.FeaturesDict(
    {'text': tfds.features.Text(), 'url': tfds.features.Text()}
  )
  infos = []
  for split, texts_ in splits.items():
    parts = [texts_[i::files] for i in range(files)]
    for i, part in enumerate(parts):
      name = f'toy-{split}.array_record-{i:05d}-of-{files:05d}'
      examples = [
        features.serialize_example({'text': text, 'url': f'u{k}'})
        for k, text in enumerate(part)
      ]
      write_records(version / name, examples)
    template = tfds.core.ShardedFileTemplate(
      data_dir=version,
      dataset_name='toy',
      split=split,
      filetype_suffix='array_record',
    )
    infos.append(
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=[len(part) for part in parts],
        num_bytes=0,
        filename_template=template,
      )
    )
  tfds.folder_dataset.write_metadata(
    data_dir=str(version),
    features=features,
    split_infos=infos,
    filename_template='{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}',
    check_data=False,
  )
  return version


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


def tiktoken_file(path: pathlib.Path, documents: Sequence[str]) -> str:
  """Writes ranks of all bytes and of the most frequent pairs of letters."""
  pairs = {}
  for text in documents:
    for pair in itertools.pairwise(text):
      token = ''.join(pair).encode()
      if len(token) == 2:
        pairs[token] = pairs.get(token, 0) + 1
  best = sorted(pairs, key=lambda token: (-pairs[token], token))[:40]
  tokens = [*(bytes([byte]) for byte in range(256)), *best]
  lines = [
    base64.b64encode(token) + b' %d' % rank for rank, token in enumerate(tokens)
  ]
  path.write_bytes(b'\n'.join(lines) + b'\n')
  return f'tiktoken:{path}'
