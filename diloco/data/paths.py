# SPDX-License-Identifier: Apache-2.0
"""Finds files by path, folder or pattern, locally or at a URL (gs://…).

URLs are listed by etils.epath, for which gs:// requires the extra `gcs`.
"""

import glob
import os
import re
from collections.abc import Sequence

from etils import epath

_WILD = re.compile(r'[*?\[]')


def is_remote(path: str) -> bool:
  """Returns True for a URL, such as gs://bucket/file."""
  return '://' in path


def find(path: str, patterns: Sequence[str]) -> list[str]:
  """Returns the files of a path in order of their names; local ones absolute.

  Args:
    path: a file; a folder, of which the files that match a pattern are taken;
      or a pattern in its last part, such as /data/train-*.parquet.
    patterns: patterns of a folder's files.

  Raises:
    FileNotFoundError: there is none; names the path.
    ValueError: a URL is of an unknown kind, or its package is missing.
  """
  found = _remote(path, patterns) if is_remote(path) else _local(path, patterns)
  if not found:
    raise FileNotFoundError(
      f'data: {path!r}: there is no such file, nor a folder with files '
      f'{" or ".join(patterns)}'
    )
  return sorted(set(found))


def stamp(path: str) -> str:
  """Returns name, size and time of a file, which differ after a change."""
  if is_remote(path):
    status = epath.Path(path).stat()
    return f'{path}|{status.length}|{status.mtime}'
  status = os.stat(path)
  return f'{path}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}'


def _local(path: str, patterns: Sequence[str]) -> list[str]:
  path = os.path.abspath(os.path.expanduser(path))
  if os.path.isfile(path):  # Even if its name looks like a pattern.
    return [path]
  escaped = glob.escape(path)
  wanted = [path] if not os.path.isdir(path) else []
  wanted += [os.path.join(escaped, p) for p in patterns if not wanted]
  return [
    file for each in wanted for file in glob.glob(each) if os.path.isfile(file)
  ]


def _remote(path: str, patterns: Sequence[str]) -> list[str]:
  folder, _, name = path.rstrip('/').rpartition('/')
  try:
    if _WILD.search(name):
      return [os.fspath(file) for file in epath.Path(folder).glob(name)]
    whole = epath.Path(path)
    if whole.is_dir():
      return [os.fspath(file) for p in patterns for file in whole.glob(p)]
    return [path] if whole.exists() else []
  except KeyError:
    raise ValueError(
      f'data: {path!r}: nothing can be read by such a URL, gs:// can'
    ) from None
  except ImportError as error:
    raise ValueError(
      f"data: {path!r}: {error}: pip install 'diloco[gcs]'"
    ) from None
