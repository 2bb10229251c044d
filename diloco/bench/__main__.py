# SPDX-License-Identifier: Apache-2.0
"""Measures the whole system: python -m diloco.bench --all

  python -m diloco.bench --all [--repeats=3] [--markdown=FILE] [--json=FILE]
  python -m diloco.bench --only=round,int4 [--millions=1,10,50]
  python -m diloco.bench --only=hosts --write_speeds=FILE
  python -m diloco.bench --list

One table: medians and spreads over the repetitions, and ratios to what was
measured beside in the same run. Exit code 0: all was measured, whatever the
figures; 1: a row could not be; 78: it can't run as asked.
"""

import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence

import rich.console
from absl import flags as absl_flags
from absl import logging

from diloco.bench import measurement
from diloco.bench.measurement import (
  BenchFailed,
  BenchSettings,
  Measured,
  RepeatedFigure,
)
from diloco.bench.rows import (
  HOSTS,
  LOSS,
  PAUSES,
  RETURN,
  ROWS,
  SLICES,
  host_speeds,
)
from diloco.config import flags
from diloco.config.sections import ConfigError
from diloco.fleets import pauses
from diloco.metrics import files
from diloco.metrics.run_progress import ProgressLine, count
from diloco.pages import terminal

WIDTH = 150  # Of the table where there is no terminal.


def define_flags() -> None:
  """The flags of this main."""
  absl_flags.DEFINE_bool('all', False, 'Measures all rows.')
  absl_flags.DEFINE_list('only', [], 'Measures these rows.')
  absl_flags.DEFINE_bool('list', False, 'Prints the rows; measures nothing.')
  absl_flags.DEFINE_integer(
    'repeats', 3, 'Repetitions of each row.', lower_bound=1
  )
  absl_flags.DEFINE_list(
    'millions', ['1', '10'], 'Parameters of rows that differ by size.'
  )
  absl_flags.DEFINE_float(
    'minutes', 2.0, 'Minutes of the row `long`.', lower_bound=0.1
  )
  absl_flags.DEFINE_bool(
    'smallest', False, 'Makes everything tiny: to see that it works.'
  )
  absl_flags.DEFINE_string(
    'markdown', None, 'File for the table, as a page of docs has it.'
  )
  absl_flags.DEFINE_string('json', None, 'File for all figures.')
  absl_flags.DEFINE_string(
    'write_speeds', None, 'File for what `diloco plan` knows of hosts.'
  )
  absl_flags.DEFINE_string(
    'write_pauses', None, 'File for what it knows of slices; it gets an entry.'
  )


def main(argv: Sequence[str]) -> int:
  asked = absl_flags.FLAGS
  if len(argv) > 1:
    raise ConfigError(f'{argv[1]}: unexpected argument')
  if asked.list:
    print('\n'.join(f'  {name:16}{row.title}' for name, row in ROWS.items()))
    return 0
  names = chosen(asked.all, asked.only)
  settings = BenchSettings(asked.smallest, sizes(asked.millions), asked.minutes)
  if asked.write_speeds and HOSTS not in names:
    raise ConfigError(f'--write_speeds: needs the row {HOSTS}')
  if asked.write_pauses and PAUSES not in names:
    raise ConfigError(f'--write_pauses: needs the row {PAUSES}')
  written = (
    asked.markdown, asked.json, asked.write_speeds, asked.write_pauses,
  )  # fmt: skip
  check_writable([pathlib.Path(p) for p in written if p])
  logging.set_verbosity(logging.ERROR)
  # Ends the processes of a run, too.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  machine, whole = measurement.describe(), measurement.LoadMeter()
  with ProgressLine() as line:
    rows, failed = measure(names, settings, asked.repeats, line.say)
  again = shlex.join(['python', '-m', 'diloco.bench', *sys.argv[1:]])
  measured = Measured(rows, failed, machine, whole.others(), again)
  console = rich.console.Console(
    color_system=None, highlight=False, markup=False, emoji=False
  )
  if not console.is_terminal:
    console.width = max(console.width, WIDTH)
  page = measured.page()
  terminal.show(page, console)
  if asked.markdown:
    pathlib.Path(asked.markdown).write_text(measurement.as_markdown(page))
  if asked.json:
    files.write_json(pathlib.Path(asked.json), measured.record())
  if asked.write_speeds and HOSTS not in failed:
    files.write_json(pathlib.Path(asked.write_speeds), speeds_of(measured))
  if asked.write_pauses and PAUSES not in failed:
    for entry in pauses_of(measured):
      pauses.write_pause(entry, pathlib.Path(asked.write_pauses))
  return 1 if failed else 0


def measure(
  names: Sequence[str],
  settings: BenchSettings,
  repeats: int,
  say: Callable[[str], None],
) -> tuple[list[RepeatedFigure], dict[str, str]]:
  """Returns the figures, and why other rows could not be measured."""
  rows, failed = [], {}
  began_s, total = time.monotonic(), len(names) * repeats
  costs = [ROWS[name].seconds for name in names for _ in range(repeats)]
  for number, name in enumerate(names):
    meter, repetitions = measurement.LoadMeter(), []
    try:
      for i in range(repeats):
        done = number * repeats + i
        far = count(done, total, began_s, sum(costs[:done]) / sum(costs))
        say(f'{far}  {name}, repetition {i + 1} of {repeats}')
        repetitions.append(list(ROWS[name].measure(settings)))
    except BenchFailed as error:
      failed[name] = str(error)
      continue
    rows += measurement.repeated(name, repetitions, meter.others())
  return rows, failed


def speeds_of(measured: Measured) -> dict:
  """Returns what `diloco plan` reads of hosts: medians of the row `hosts`."""
  machine = measured.machine
  own = [figure for figure in measured.figures if figure.row == HOSTS]
  speeds = host_speeds({f.name: f.median for f in own})
  return {
    'machine': f'{machine["cpu"]}, {machine["cores_allowed"]} cores',
    'date': machine['time'][:10],
    'commit': machine['commit'],
    'command': f'python -m diloco.bench --only={HOSTS} --write_speeds=FILE',
    'others': own[0].others,
    **{name: float(f'{value:.3g}') for name, value in speeds.items()},
  }


def pauses_of(measured: Measured) -> list[pauses.MeasuredPause]:
  """Returns what the row `slices` has measured, an entry for each size."""
  machine = measured.machine
  medians = {x.name: x.median for x in measured.figures if x.row == PAUSES}
  return [
    pauses.MeasuredPause(
      params=1e6 * float(name.partition(' ')[0]),
      slices=SLICES,
      hosts=1,
      how='standby',
      shrink_s=float(f'{medians[name]:.3g}'),
      regrow_s=float(f'{medians[name[: -len(LOSS)] + RETURN]:.3g}'),
      machine=f'{machine["cpu"]}, {machine["cores_allowed"]} cores',
      date=machine['time'][:10],
      commit=machine['commit'],
    )
    for name in medians
    if name.endswith(LOSS)
  ]


def chosen(everything: bool, only: Sequence[str]) -> list[str]:
  """Returns the rows to measure; raises ConfigError."""
  if everything == bool(only):
    raise ConfigError('give --all, or --only=ROW,…; --list names the rows')
  if unknown := [name for name in only if name not in ROWS]:
    raise ConfigError(
      [f'--only={name}: must be one of {", ".join(ROWS)}' for name in unknown]
    )
  return [name for name in ROWS if everything or name in only]


def sizes(texts: Sequence[str]) -> tuple[float, ...]:
  """Returns the values of --millions; raises ConfigError."""
  try:
    found = tuple(float(text) for text in texts)
  except ValueError:
    found = ()
  if not found or not all(0 < size < 1e6 for size in found):
    raise ConfigError(
      f'--millions={",".join(texts)}: must be numbers above 0, such as 1,10'
    )
  return found


def check_writable(paths: Sequence[pathlib.Path]) -> None:
  """Finds out before an hour of measuring; raises ConfigError."""
  for path in paths:
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      path.open('a').close()
    except OSError as error:
      raise ConfigError(f'{path}: {error.strerror}') from None


if __name__ == '__main__':
  define_flags()
  flags.run_without_config(main)
