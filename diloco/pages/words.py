# SPDX-License-Identifier: Apache-2.0
"""Numbers as people say them on axes: 150k, 1.2M, 0.43."""

UNITS = ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k'))


def in_thousands(value: float) -> str:
  """A number in at most four digits, with k, M, G or T.

  From 10⁴ on: 2000 stays 2000, as years and steps are written.
  """
  if abs(value) >= 1e4:
    for size, unit in UNITS:
      if abs(value) >= size:
        return f'{value / size:.4g}{unit}'
  return f'{value:.4g}'


def duration(time_s: float) -> str:
  """Seconds as '0.8 s', '3 min 20 s', '2 h 5 min'."""
  if time_s < 120:
    return f'{time_s:.3g} s'
  minutes, seconds = divmod(round(time_s), 60)
  if minutes < 120:
    return f'{minutes} min {seconds} s'
  return f'{minutes // 60} h {minutes % 60} min'
