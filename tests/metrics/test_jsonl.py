# SPDX-License-Identifier: Apache-2.0
"""Files of lines that grow: rotated, read from either end, on a full disk."""

import contextlib
import json
import resource
import tracemalloc

import pytest

from diloco.metrics import files, jsonl
from diloco.metrics.jsonl import CorruptLine, JsonLines, Tail, read_jsonl
from diloco.metrics.writer import TensorBoardWriter
from tests.metrics import board_events


def _line(number):
  return json.dumps({'number': number}).encode()


def _numbers(records):
  return [each['number'] for each in records]


@contextlib.contextmanager
def _file_size_max(nbytes):
  """Acts as a disk of that size: a write is cut short, the next fails."""
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limit[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_all_parts_are_read_and_only_their_size_is_bounded(tmp_path):
  path = tmp_path / 'a.jsonl'
  lines, tail, seen = JsonLines(path, part_bytes=100), Tail(path), []
  for number in range(40):
    lines.append(_line(number))
    if number % 7 == 0:
      seen += tail.new_records()
  lines.close()
  seen += tail.new_records()
  assert len(jsonl.parts(path)) > 5
  assert all(part.stat().st_size <= 100 for part in jsonl.parts(path))
  assert _numbers(read_jsonl(path)) == list(range(40))
  assert _numbers(seen) == list(range(40))
  assert _numbers(jsonl.from_the_end(path)) == list(range(39, -1, -1))


def test_another_process_goes_on_in_the_same_part(tmp_path):
  path = tmp_path / 'a.jsonl'
  for number in range(4):
    lines = JsonLines(path, part_bytes=40)
    lines.append(_line(number))
    lines.close()
  assert _numbers(read_jsonl(path)) == [0, 1, 2, 3]
  assert len(jsonl.parts(path)) == 2


@pytest.mark.parametrize('broken', [b'{"numb', b'3'])
def test_a_broken_line_stops_only_those_that_ask_for_all(tmp_path, broken):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{"number": 1}\n%s\n{"number": 3}\n' % broken)
  assert _numbers(Tail(path).new_records(lambda error: None)) == [1, 3]
  assert _numbers(jsonl.from_the_end(path)) == [3, 1]
  for read in (Tail(path).new_records, lambda: read_jsonl(path)):
    with pytest.raises(CorruptLine, match=r'a\.jsonl:2: '):
      read()


@pytest.mark.parametrize('block', [1, 3, 64, 1 << 16])
def test_from_the_end_a_torn_line_is_left_out(tmp_path, monkeypatch, block):
  monkeypatch.setattr(jsonl, 'BLOCK_BYTES', block)
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{"number": 1}\n{"number": 22}\n{"numb')
  assert _numbers(jsonl.from_the_end(path)) == [22, 1]
  jsonl.cut_torn_line(path)
  assert path.read_bytes() == b'{"number": 1}\n{"number": 22}\n'


def test_the_newest_record_of_a_long_file_takes_little_memory(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes((_line(0) + b'\n') * 1_000_000 + b'{"torn')
  tracemalloc.start()
  JsonLines(path).close()
  assert next(jsonl.from_the_end(path)) == {'number': 0}
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert path.stat().st_size > 10_000_000
  assert peak < 1_000_000


def test_every_changed_bit_of_a_sealed_line_is_noticed_or_harmless(tmp_path):
  path = tmp_path / 'a.jsonl'
  sealed = files.seal(_line(1234))
  for bit in range(8 * len(sealed)):
    changed = bytearray(sealed)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(changed) + b'\n')
    with contextlib.suppress(CorruptLine):
      assert _numbers(read_jsonl(path))[0] == 1234, bit


def test_a_full_disk_holds_lines_back_and_keeps_them_whole(tmp_path):
  path = tmp_path / 'a.jsonl'
  lines = JsonLines(path)
  lines.append(_line(0))
  with _file_size_max(path.stat().st_size + 5):
    lines.append(_line(1))
    lines.append(_line(2))
    assert _numbers(read_jsonl(path)) == [0]
  lines.append(_line(3))
  lines.close()
  assert _numbers(read_jsonl(path)) == [0, 1, 2, 3]


def test_what_waits_for_a_full_disk_is_bounded(tmp_path, monkeypatch):
  monkeypatch.setattr(jsonl, 'WAITING_BYTES_MAX', 100)
  path = tmp_path / 'a.jsonl'
  lines = JsonLines(path)
  with _file_size_max(0):
    for number in range(1000):
      lines.append(_line(number))
  lines.append(_line(1000))
  lines.close()
  kept = _numbers(read_jsonl(path))
  assert kept == list(range(1001 - len(kept), 1001))
  assert 1 < len(kept) < 10


def test_a_file_that_can_not_be_made_is_made_later(tmp_path):
  (tmp_path / 'folder').write_text('in the way')
  lines = JsonLines(tmp_path / 'folder' / 'a.jsonl')
  lines.append(_line(1))
  (tmp_path / 'folder').unlink()
  lines.append(_line(2))
  lines.close()
  assert _numbers(read_jsonl(tmp_path / 'folder' / 'a.jsonl')) == [1, 2]


def test_tensorboard_outlives_a_full_disk(tmp_path):
  writer = TensorBoardWriter(tmp_path / 'board')
  with _file_size_max(0):
    for step in range(200):  # More than its queue holds.
      writer.write_scalars(step, {'loss': 1.0})
    writer.flush()
  writer.write_scalars(200, {'loss': 1.0})
  writer.close()
  [path] = (tmp_path / 'board').iterdir()
  steps = [event.step for event in board_events.read(path)]
  assert steps == [0, *range(201)]  # The first says the version.
