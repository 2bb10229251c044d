# SPDX-License-Identifier: Apache-2.0
"""Folders that the package `datasets` saved to a disk: Arrow streams.

The files are memory-mapped, so that any row can be read by itself; `datasets`
is not needed.
"""

import functools
import json
import os

from diloco.data import paths, sources
from diloco.data.dialogues import Dialogue
from diloco.data.documents import DocumentFile, allow_open
from diloco.data.parquet_files import check_columns, documents
from diloco.data.tokenizers import needed

SPLITS = 'dataset_dict.json'  # In a folder with several, each in a folder.
STATE = 'state.json'


def open_files(
  path: str, text_key: str, index_folder: str = ''
) -> list[DocumentFile]:
  """Returns the files of a path, which are mapped.

  Args:
    path: a file, a folder or a pattern, local.

  Raises:
    FileNotFoundError: there is none.
    ValueError: pyarrow is missing; the folder has several splits, or its rows
      are chosen by indices; a file is no stream of Arrow, or has no such
      columns.
  """
  del index_folder  # None is needed.
  with needed("data.source='arrow'"):
    import pyarrow as pa
  if paths.is_remote(path):
    raise ValueError(f'data: {path!r}: Arrow files are read from a local disk')
  _check_folder(os.path.expanduser(path))
  names = paths.find(path, sources.FORMATS['arrow'].patterns)
  allow_open(len(names))
  columns = list(sources.fields_of(text_key))
  files = []
  for name in names:
    try:
      table = pa.ipc.open_stream(pa.memory_map(name)).read_all()
    except (pa.ArrowInvalid, OSError) as error:
      raise ValueError(f'{name}: is no stream of Arrow ({error})') from None
    check_columns(pa, table.schema, name, text_key)
    files.append(
      DocumentFile(
        name=name,
        stamp=f'arrow|{text_key}|{paths.stamp(name)}',
        count=table.num_rows,
        groups=0,
        read=functools.partial(_read, table.select(columns), name, text_key),
        masked=sources.is_masked(text_key),
      )
    )
  return files


def _read(
  table, name: str, text_key: str, start: int, stop: int
) -> list[bytes | Dialogue]:
  rows = table.slice(start, stop - start)
  return documents(rows, name, text_key, start)


def _check_folder(folder: str):
  """Raises ValueError for a folder that is not one table of rows in order."""
  splits, state = (os.path.join(folder, each) for each in (SPLITS, STATE))
  if os.path.exists(splits):
    with open(splits) as file:
      names = json.load(file)['splits']
    raise ValueError(
      f'data: {folder!r}: has the splits {", ".join(names)}; name one, such as '
      f'{os.path.join(folder, names[0])!r}'
    )
  if os.path.exists(state):
    with open(state) as file:
      if json.load(file).get('_indices_files'):
        raise ValueError(
          f'data: {folder!r}: its rows are chosen by indices, which are not '
          'read; save it after flatten_indices()'
        )
