# SPDX-License-Identifier: Apache-2.0
"""The command that indexes a run's data beforehand, and says what it is."""

import re

import pytest

from tests.commands import python
from tests.data import made_files


def _run(tmp_path, *overrides):
  keys = *overrides, f'index_path={tmp_path / "indices"}'
  command = '-m', 'diloco.index_data', '--config=experiments/tests_tiny.py'
  return python(*command, *(f'--config.data.{each}' for each in keys))


def test_it_counts_tokens_and_epochs(tmp_path):
  texts = made_files.texts(200)
  one = made_files.array_records(tmp_path / 'records', texts)
  other = made_files.parquet(tmp_path / 'parquet', texts)
  mix = (f'3 array_record: {one}', f'1 parquet {other}')
  ended = _run(tmp_path, 'source=mix', f'mix={mix!r}')
  assert ended.returncode == 0, ended.stderr
  assert len(re.findall(r'index \d of \d: ', ended.stderr)) == 5
  name, *lines = ended.stdout.splitlines()
  assert re.fullmatch(rf'.* of {one} and .* {other}, fingerprint \w+', name)
  pattern = r'train: ([\d,]+) tokens of 0\.99 bytes, .* takes ([\d.]+) epochs'
  taken = 2 * 60 * 4 * 32  # Learners, steps, sequences, tokens.
  for line, share in zip(lines, (0.75, 0.25)):
    tokens, epochs = re.fullmatch(pattern, line).groups()
    tokens = int(tokens.replace(',', ''))
    assert float(epochs) == pytest.approx(taken * share / tokens, rel=0.01)
  assert [line.partition(':')[0] for line in lines[2:]] == ['held out'] * 2


def test_data_that_will_not_do(tmp_path):
  ended = _run(tmp_path, 'source=parquet', f'path={tmp_path}/none')
  assert ended.returncode == 78
  assert ended.stderr.startswith(f"error: data: '{tmp_path}/none': there is no")
