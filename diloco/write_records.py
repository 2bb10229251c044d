# SPDX-License-Identifier: Apache-2.0
"""Writes ArrayRecord shards of text files: python -m diloco.write_records …

  python -m diloco.write_records --out=DIR --shards=N [--tokenizer=KIND:FILE] \\
    [--documents=file|line|jsonl] [--text_key=text] FILES…

A record is a document: its text or, with --tokenizer, its tokens. Documents
are dealt to the shards in turn, some at a time in memory. DIR appears whole,
and nothing is overwritten. A run reads it with data.source='array_record',
data.path='DIR' and, where it is of tokens, the same data.tokenizer.
"""

import pathlib

import numpy as np
from absl import flags

from diloco.config import flags as config_flags
from diloco.data.paths import KINDS, read_documents
from diloco.data.records_folder import SHARDS_MAX, write_records
from diloco.data.tokenizers import make_tokenizer
from diloco.metrics.run_progress import ProgressLine, counter

_OUT = flags.DEFINE_string('out', None, 'Folder to write; not there yet.')
_SHARDS = flags.DEFINE_integer(
  'shards', None, 'Files to write.', lower_bound=1, upper_bound=SHARDS_MAX
)
_TOKENIZER = flags.DEFINE_string(
  'tokenizer',
  None,
  'Tokenizer, as data.tokenizer; without it, the text is written.',
)
_END_TOKEN = flags.DEFINE_string(
  'end_token', '', 'Token after each document, as data.end_token.'
)
_DOCUMENTS = flags.DEFINE_enum(
  'documents', 'file', KINDS, 'Unit of FILES that is a document.'
)
_TEXT_KEY = flags.DEFINE_string(
  'text_key', 'text', 'Field of a line of jsonl that has the text.'
)


def main(arguments) -> int:
  """Writes and says what; 78 where it can't."""
  out = pathlib.Path(_OUT.value)
  name = _TOKENIZER.value
  files = [pathlib.Path(each) for each in arguments[1:]]
  with ProgressLine() as line, config_flags.refusing(ValueError, OSError):
    if not files:
      raise ValueError('FILES: there are none')
    if not out.absolute().parent.is_dir():
      raise ValueError(f'--out={out}: there is no folder to make it in')
    if _END_TOKEN.value and name is None:
      raise ValueError('--end_token: has an effect only with --tokenizer')
    written = write_records(
      out,
      _SHARDS.value,
      read_documents(
        files, _DOCUMENTS.value, _TEXT_KEY.value, counter(line.say, 'bytes')
      ),
      None if name is None else make_tokenizer(name, _END_TOKEN.value),
    )
  for shard, count in written.shards.items():
    print(f'{out / shard}: {count:,} documents')
  print(f'{written.documents:,} documents of {written.text_bytes:,} bytes')
  if name is not None:
    print(f'{written.tokens:,} tokens as {np.dtype(written.dtype).name}')
  return 0


if __name__ == '__main__':
  flags.mark_flags_as_required(['out', 'shards'])
  config_flags.run_without_config(main)
