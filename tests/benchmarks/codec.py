# SPDX-License-Identifier: Apache-2.0
"""Measures the speed and the error of every codec on this machine.

    python -m tests.benchmarks.codec

One thread, Gaussian values; the best of some repetitions. GB/s count the f32
side. The first row is a plain copy in the same run, which tells how fast the
memory is.
"""

import argparse
import timeit
from collections.abc import Callable, Sequence

import numpy as np

from diloco.numerics import codec


def main(argv: Sequence[str] | None = None):
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument(
    '--values', type=int, default=16 << 20, help='Vector size.'
  )
  parser.add_argument('--repeat', type=int, default=5, help='Best of so many.')
  parser.add_argument('--block_size', type=int, default=128, help='Values.')
  parser.add_argument('--scale', default='bf16', help='Scale type: bf16, f32.')
  args = parser.parse_args(argv)
  print(report(args.values, args.repeat, args.block_size, args.scale))


def report(values: int, repeat: int, block_size: int, scale: str) -> str:
  """Returns the table as text; takes about `repeat` · 2 s with 16 Mi values."""
  x = np.random.default_rng(0).standard_normal(values, np.float32)
  rows = ['codec   encode GB/s  decode GB/s  bytes/value  relative error']
  speed = _gb_per_s(x.copy, x.nbytes, repeat)
  rows.append(f'{"copy":6}  {speed:11.2f}  {speed:11.2f}  {4:11.4f}  {0:14.5f}')
  for name in codec.NAMES:
    chosen = codec.make_codec(name, block_size, scale)
    data = chosen.encode(x)
    error = np.linalg.norm(chosen.decode(data, values) - x) / np.linalg.norm(x)
    encode = _gb_per_s(lambda c=chosen: c.encode(x), x.nbytes, repeat)
    decode = _gb_per_s(
      lambda c=chosen, d=data: c.decode(d, values), x.nbytes, repeat
    )
    rows.append(
      f'{name:6}  {encode:11.2f}  {decode:11.2f}  '
      f'{data.nbytes / values:11.4f}  {error:14.5f}'
    )
  return '\n'.join(rows)


def _gb_per_s(call: Callable, nbytes: int, repeat: int) -> float:
  return nbytes / min(timeit.repeat(call, number=1, repeat=repeat)) / 1e9


if __name__ == '__main__':
  main()
