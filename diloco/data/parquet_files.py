# SPDX-License-Identifier: Apache-2.0
"""Reads columns of Parquet files, one row group at a time.

pyarrow itself reads gs://. A row group is the least that can be read, so a few
are cached, and rows are visited group by group (`pipeline`): memory is
`GROUPS_KEPT` groups of these columns, whatever the size of the files. Write
them with some thousand rows per group.
"""

import bisect
import functools

from diloco.data import paths, sources
from diloco.data.dialogues import Dialogue, document_of
from diloco.data.documents import DocumentFile
from diloco.data.tokenizers import needed

# Per source: groups of the runs that are shuffled together, of their ends, and
# those that are read ahead.
GROUPS_KEPT = 12


def open_files(
  path: str, text_key: str, index_folder: str = ''
) -> list[DocumentFile]:
  """Returns the files of a path; their footers are read.

  Args:
    path: a file, a folder or a pattern, local or gs://.

  Raises:
    FileNotFoundError: there is none.
    ValueError: pyarrow is missing; a file is not Parquet, or has no such
      columns.
  """
  del index_folder  # It has an index of its own.
  with needed("data.source='parquet'"):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import fs
  files, metadata = [], []

  def opened(name: str, footer=None):
    if not paths.is_remote(name):
      return pq.ParquetFile(name, metadata=footer)
    system, inner = fs.FileSystem.from_uri(name)
    return pq.ParquetFile(inner, metadata=footer, filesystem=system)

  @functools.lru_cache(maxsize=GROUPS_KEPT)
  def group(file: int, number: int):
    # Opened each time: an open one must not be read by two threads.
    with opened(names[file], metadata[file]) as source:
      return source.read_row_group(number, columns=columns)

  columns = list(sources.fields_of(text_key))
  names = paths.find(path, sources.FORMATS['parquet'].patterns)
  for file, name in enumerate(names):
    try:
      with opened(name) as source:
        schema, footer = source.schema_arrow, source.metadata
    except (pa.ArrowInvalid, OSError) as error:
      raise ValueError(f'{name}: is no Parquet file ({error})') from None
    check_columns(pa, schema, name, text_key)
    metadata.append(footer)
    ends, rows = [], 0
    for number in range(footer.num_row_groups):
      rows += footer.row_group(number).num_rows
      ends.append(rows)
    files.append(
      DocumentFile(
        name=name,
        stamp=f'parquet|{text_key}|{paths.stamp(name)}',
        count=rows,
        groups=footer.num_row_groups,
        read=functools.partial(
          _read, functools.partial(group, file), ends, name, text_key
        ),
        masked=sources.is_masked(text_key),
      )
    )
  return files


def _read(
  group, ends: list[int], name: str, text_key: str, start: int, stop: int
) -> list[bytes | Dialogue]:
  found = []
  number = bisect.bisect_right(ends, start)
  while start < stop:
    begin, end = ends[number - 1] if number else 0, min(stop, ends[number])
    rows = group(number).slice(start - begin, end - start)
    found += documents(rows, name, text_key, start)
    start, number = end, number + 1
  return found


def documents(
  rows, name: str, text_key: str, first: int
) -> list[bytes | Dialogue]:
  """Returns the documents of a table's rows; a null is an empty text.

  Args:
    rows: a table of pyarrow with the columns that `text_key` names.
    name: of their file.
    first: number of the first row.

  Raises:
    ValueError: a row is no such record; names it.
  """
  if not sources.is_masked(text_key):
    return [_bytes(value) for value in rows.column(text_key).to_pylist()]
  found = []
  for i, row in enumerate(rows.to_pylist(), first):
    try:
      found.append(document_of(row, text_key))
    except ValueError as error:
      raise ValueError(f'{name}, row {i}: {error}') from None
  return found


def _bytes(value: str | bytes | None) -> bytes:
  return value.encode() if isinstance(value, str) else value or b''


def check_columns(pa, schema, name: str, text_key: str) -> None:
  """Checks that a table has the columns that `text_key` names.

  Raises:
    ValueError: it has not; names those there are.
  """
  for column in sources.fields_of(text_key):
    if column not in schema.names:
      raise ValueError(
        f'{name}: has no column data.text_key={column!r}, those there are: '
        f'{", ".join(schema.names)}'
      )
  if sources.is_masked(text_key):
    return  # What is in the rows is checked as they are read.
  kind = schema.field(text_key).type
  tests = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
  )
  if not any(test(kind) for test in tests):
    raise ValueError(
      f'{name}: column data.text_key={text_key!r} is of {kind}, must be text'
    )
