# SPDX-License-Identifier: Apache-2.0
"""Reads prepared datasets of TFDS in ArrayRecord files, without TensorFlow.

A path is the folder of a version, such as /data/c4/en/3.0.1, local or gs://,
with the split after '#' if it is not 'train': DIR#validation, DIR#train[:10%].
TFDS reads the metadata and decodes records; the records themselves are read as
from any other ArrayRecord file.
"""

import functools
from collections.abc import Callable

from diloco.data import paths
from diloco.data.array_records import open_records, read_records
from diloco.data.documents import DocumentFile, allow_open
from diloco.data.paths import needed

SPLIT = 'train'


def open_files(path: str, text_key: str) -> list[DocumentFile]:
  """Returns the files of a split.

  Args:
    path: DIR or DIR#SPLIT.

  Raises:
    FileNotFoundError: there is no prepared dataset.
    ValueError: tensorflow-datasets is missing; the dataset has other files than
      ArrayRecord; there is no such split or feature.
  """
  with needed('tfds', "data.source='tfds'"):
    import tensorflow_datasets as tfds
  folder, _, split = path.partition('#')
  split = split or SPLIT
  paths.find(folder, ('dataset_info.json',))
  try:
    info = tfds.builder_from_directory(folder).info
  except (ValueError, KeyError) as error:
    raise ValueError(f'data: {path!r}: {_line(error)}') from None
  if info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
    raise ValueError(
      f'data: {path!r}: its files are {info.file_format.value}, only '
      "array_record can be read by number; TFDS's cli converts them"
    )
  if text_key not in info.features:
    raise ValueError(
      f'data: {path!r}: has no feature data.text_key={text_key!r}, those '
      f'there are: {", ".join(sorted(info.features))}'
    )
  try:
    instructions = info.splits[split].file_instructions
  except (ValueError, KeyError) as error:
    raise ValueError(
      f'data: {path!r}: no split {split!r}, those there are: '
      f'{", ".join(sorted(info.splits))} ({_line(error)})'
    ) from None
  allow_open(len(instructions))
  decode = _decoder(info.features, text_key)
  files = []
  for each in instructions:
    source = open_records(each)
    part = f'{each.filename}[{each.skip}:{each.skip + len(source)}]'
    files.append(
      DocumentFile(
        name=part,
        stamp=f'tfds|{text_key}|{part}|{paths.stamp(each.filename)}',
        count=len(source),
        groups=0,
        read=functools.partial(read_records, source, decode),
      )
    )
  return files


def _decoder(features, text_key: str) -> Callable[[bytes], bytes]:
  """Returns a function that takes the text out of a record."""
  only = type(features)({text_key: features[text_key]})

  def decode(record: bytes) -> bytes:
    return only.deserialize_example_np(record)[text_key]

  return decode


def _line(error: Exception) -> str:
  return ' '.join(str(error).split())[:200]
