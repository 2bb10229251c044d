# SPDX-License-Identifier: Apache-2.0
"""Measures speed and error of codecs on one core, beside a plain copy.

Gaussian values; GB/s count the f32 side, by CPU time.
"""

import time
from collections.abc import Iterable, Iterator

import numpy as np

from diloco.bench.measurement import (
  BenchFigure,
  BenchSettings,
  copying,
  in_turns,
)
from diloco.numerics import codec

COPY = 'a copy of the f32 values'
TURNS = 5
BLOCK_SIZE = 128  # Values.
SCALE = 'bf16'
WIRE = 'int4'  # The default of both directions.


def measure_int4(settings: BenchSettings) -> list[BenchFigure]:
  """Measures the codec of the wire."""
  return list(_measure([WIRE], settings))


def measure_others(settings: BenchSettings) -> list[BenchFigure]:
  """Measures all other codecs."""
  return list(_measure([n for n in codec.NAMES if n != WIRE], settings))


def _measure(
  names: Iterable[str], settings: BenchSettings
) -> Iterator[BenchFigure]:
  values = settings.pick(16 << 20, 1 << 16)
  x = np.random.default_rng(0).standard_normal(values, np.float32)
  copy = copying(values)
  for name in names:
    chosen = codec.make_codec(name, BLOCK_SIZE, SCALE)
    data = chosen.encode(x)
    calls = {
      'encode': lambda c=chosen: c.encode(x),
      'decode': lambda c=chosen, d=data: c.decode(d, values),
    }
    for what, call in calls.items():
      # This thread's: others of the process may be at work.
      pair = in_turns(call, copy, TURNS, time.thread_time)
      speed = x.nbytes / pair.work_s / 1e9
      yield BenchFigure(f'{name} {what}', speed, 'GB/s', pair.ratio, COPY)
    yield BenchFigure(
      f'{name} size', data.nbytes / values, 'B/value',
      data.nbytes / x.nbytes, 'f32',
    )  # fmt: skip
    error = np.linalg.norm(chosen.decode(data, values) - x) / np.linalg.norm(x)
    yield BenchFigure(f'{name} relative error', float(error), '')
