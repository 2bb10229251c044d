# SPDX-License-Identifier: Apache-2.0
r"""Measures how much of the compute training keeps over slow links.

  python -m tests.netbench [--systems=int4,bf16,f32,diloco,data_parallel] \
    [--mbits=1,3,10,30,100,300] [--millions=0.4] [--learners=2] \
    [--delay_ms=0] [--step_s=0.25] [--seconds=12] [--json=FILE]
  python -m tests.netbench --study=sites      # or unequal, visitors

A syncer and learners, or the workers of one data-parallel computation, run as
real processes in network namespaces of their own, over links of each rate; a
step sleeps, as devices would compute. Linux, as root, with ip and tc. A study
follows what becomes of rounds and tokens: over a slow link between two sites;
with slow learners, or with visitors, both on loopback. Exit code 0: all was
measured; 1: a system could not be; 78: it can't run as asked; 130, 143: Ctrl-C,
SIGTERM.
"""

import contextlib
import dataclasses
import pathlib
import shlex
import sys
import time
from collections.abc import Sequence

import rich.console
from absl import flags as absl_flags

from diloco.config import flags
from diloco.config.sections import ConfigError
from diloco.metrics import files
from diloco.metrics.run_progress import ProgressLine, count, counted
from launch.session import Interrupted, signals
from tests.netbench import link_tables, links, studies
from tests.netbench.links import LinksFailed, Loopback, ShapedLinks, SiteLinks
from tests.netbench.net_systems import SYSTEMS, Setting
from tests.netbench.process_run import SystemFailed, remove_left
from tests.netbench.studies import STUDIES, NetStudy, StudyCell
from tests.netbench.system_run import NetCell, SystemRun

RATES = 'rates'  # All systems over links of all rates.

WIDTH = 150  # Of the tables where there is no terminal.
HEADROOM = 2.0  # An unshaped link must carry so many times the fastest rate.
PROBE_S = 0.5
CARRIED = (0.4, 1.1)  # Shares of its rate that a shaped link must carry.
WARM_STEPS = 5
LEARNERS_MAX = links.MEMBERS_MAX - 1  # And a syncer.
DELAY_MAX_MS = 1000.0
# What a wire may add to the delay that it was given.
DELAY_FACTOR_MAX, DELAY_SLACK_MS = 1.2, 5.0
POINTS = 5.0  # Between measured and predicted before a note says so.


def define_flags() -> None:
  """The flags of this main."""
  absl_flags.DEFINE_enum('study', RATES, (RATES, *STUDIES), 'What is compared.')
  absl_flags.DEFINE_list(
    'systems',
    list(SYSTEMS),
    f'Some of {", ".join(SYSTEMS)}; of a study, by default, '
    + '; '.join(f'{k}: {",".join(v.systems)}' for k, v in STUDIES.items()),
  )
  absl_flags.DEFINE_list(
    'mbits',
    ['1', '3', '10', '30', '100', '300'],
    'Rates of the links; between two sites by default '
    f'{",".join(f"{x:g}" for x in STUDIES["sites"].mbits)}.',
  )
  absl_flags.DEFINE_float(
    'delay_ms', 0.0, 'Time of a packet from one member to another.'
  )
  absl_flags.DEFINE_float('millions', 0.4, 'Parameters of the model.')
  absl_flags.DEFINE_integer(
    'learners',
    2,
    'Learners, or workers; of each site; that are not slow; that stay, and as '
    'many that visit.',
  )
  absl_flags.DEFINE_float('step_s', 0.25, 'Sleep of a step.')
  absl_flags.DEFINE_float('seconds', 12.0, 'Least length of a window.')
  absl_flags.DEFINE_string('json', None, 'File for all figures.')


def read_setting() -> tuple[Setting, list[str], list[float]]:
  """Returns what the flags ask for: setting, systems, rates from fast to slow.

  Raises:
    ConfigError: it can not be.
  """
  given, problems = absl_flags.FLAGS, []
  study = STUDIES.get(given.study)
  known = [n for n, kind in SYSTEMS.items() if not (study and kind.waits)]
  asked, mbits = given.systems, given.mbits
  if study:
    asked = asked if given['systems'].present else study.systems
    mbits = mbits if given['mbits'].present else study.mbits or ['1']
    if given['mbits'].present and not study.mbits:
      problems.append(f'--mbits: --study={given.study} has no link')
  for name in asked or ['']:
    if name not in known:
      problems.append(f'--systems={name}: must be some of {", ".join(known)}')
  try:
    rates = sorted({float(text) for text in mbits}, reverse=True)
  except ValueError:
    rates = []
  if not rates or not all(0 < rate < float('inf') for rate in rates):
    problems.append(
      f'--mbits={",".join(mbits)}: must be numbers above 0, such as 1,10'
    )
  for name in ('millions', 'step_s', 'seconds'):
    if not 0 < given[name].value < float('inf'):
      problems.append(f'--{name}={given[name].value:g}: must be above 0')
  if not 0 <= given.delay_ms <= DELAY_MAX_MS:
    problems.append(
      f'--delay_ms={given.delay_ms:g}: must be 0 … {DELAY_MAX_MS:g}'
    )
  elif study and given.delay_ms:
    problems.append(f'--delay_ms: --study={given.study} has no delays')
  # Of the two sites together, too, all have an address.
  least, most = (1, links.MEMBERS_MAX // 2 - 1) if study else (2, LEARNERS_MAX)
  if not least <= given.learners <= most:
    problems.append(f'--learners={given.learners}: must be {least} … {most}')
  if problems:
    raise ConfigError(problems)
  setting = Setting(
    given.learners, given.millions, given.step_s, delay_ms=given.delay_ms
  )
  return setting, list(dict.fromkeys(asked)), rates


def check_links(
  made: ShapedLinks,
  linked: Sequence[str],
  rates: Sequence[float],
  delay_ms: float = 0.0,
) -> dict[str, float]:
  """Returns what one connection carries at each rate, in Mbit/s.

  Raises:
    ConfigError: the machine is too slow for a rate.
    LinksFailed: a link carries more or less than its rate, or does not delay.
  """
  ends = (linked[-1], linked[0])
  most = made.probe_mbits(*ends, PROBE_S)
  if HEADROOM * rates[0] > most:
    raise ConfigError(
      [
        f'--mbits={rates[0]:g}: this machine moves {most:.0f} Mbit/s between '
        f'two namespaces; give at most {most / HEADROOM:.0f}'
      ]
    )
  found = {}
  for rate in rates:
    made.shape(rate)
    carried = made.probe_mbits(*ends, 2 * PROBE_S)
    found[f'{rate:g}'] = carried
    if not CARRIED[0] * rate <= carried <= CARRIED[1] * rate:
      raise LinksFailed(
        f'a link of {rate:g} Mbit/s carries {carried:.3g}: not as it was shaped'
      )
  if delay_ms:
    made.shape(rates[0], delay_ms)
    took_ms = made.probe_delay_ms(*ends)
    if not delay_ms <= took_ms <= DELAY_FACTOR_MAX * delay_ms + DELAY_SLACK_MS:
      raise LinksFailed(
        f'packets take {took_ms:.3g} ms in place of {delay_ms:g}: is the '
        'machine too busy?'
      )
    found['delay_ms'] = took_ms
  return found


def measure_rates(
  setting: Setting,
  systems: Sequence[str],
  rates: Sequence[float],
  received: list[int],
  line: ProgressLine,
) -> tuple[list[NetCell], dict[str, str], dict[str, float]]:
  """Returns all cells, why some systems have none, and what links carry."""
  with ShapedLinks(setting.linked, setting.delay_ms > 0) as made:
    carried = check_links(made, setting.linked, rates, setting.delay_ms)
    cells, failed = _measure_over(made, setting, systems, rates, received, line)
  return cells, failed, carried


def _measure_over(
  made: ShapedLinks,
  setting: Setting,
  systems: Sequence[str],
  rates: Sequence[float],
  received: list[int],
  line: ProgressLine,
) -> tuple[list[NetCell], dict[str, str]]:
  seconds = absl_flags.FLAGS.seconds
  alone_s: dict[bool, float] = {}
  cells, failed, began_s = [], {}, time.monotonic()
  of = len(systems) * len(rates)
  for number, name in enumerate(systems):
    system = SYSTEMS[name]
    said = count(number * len(rates), of, began_s)
    line.say(f'{said}  {name}, its processes start')
    try:
      if system.has_syncer not in alone_s:
        with SystemRun(system, setting, made, received, alone=True) as running:
          running.start(WARM_STEPS)
          alone_s[system.has_syncer] = running.step_s(seconds)
      with SystemRun(system, setting, made, received) as running:
        running.start(system.period(setting))
        for i, rate in enumerate(rates):
          said = count(number * len(rates) + i, of, began_s)
          line.say(f'{said}  {name}, {rate:g} Mbit/s')
          cells.append(
            running.cell(name, rate, seconds, alone_s[system.has_syncer])
          )
    except SystemFailed as error:
      failed[name] = str(error)
      line.stay(f'{name}: {error}')
  return cells, failed


def measure_study(
  study: NetStudy,
  setting: Setting,
  systems: Sequence[str],
  rates: Sequence[float],
  received: list[int],
  line: ProgressLine,
) -> tuple[list[StudyCell], dict[str, str], dict[str, float]]:
  """Returns all cells, why some runs have none, and what the link carries."""
  cells, failed, carried = [], {}, {}
  runs = list(study.runs(setting, systems, rates))
  for each in counted(
    runs, line.say, lambda run: run.name, lambda run: len(run.phases)
  ):
    with contextlib.ExitStack() as stack:
      place = Loopback()
      if each.far:
        far = [each.setting.members[m] for m in each.far]
        place = stack.enter_context(SiteLinks(each.setting.linked, far))
        carried = carried or check_links(place, each.setting.linked, rates)
      try:
        cells += studies.measure(
          each, place, absl_flags.FLAGS.seconds, received
        )
      except SystemFailed as error:
        failed[each.name] = str(error)
        line.stay(f'{each.name}: {error}')
  return cells, failed, carried


def main(argv: Sequence[str]) -> int:
  if len(argv) > 1:
    raise ConfigError([f'{argv[1]}: unexpected argument'])
  setting, systems, rates = read_setting()
  given = absl_flags.FLAGS
  study = STUDIES.get(given.study)
  if (not study or study.mbits) and (why := links.why_not_here()):
    raise ConfigError([f'tests.netbench: {why}'])
  if given.json:
    with flags.refusing(OSError, flag=f'--json={given.json}'):
      pathlib.Path(given.json).open('a').close()
  remove_left()
  console = rich.console.Console(highlight=False, markup=False, emoji=False)
  if not console.is_terminal:
    console.width = max(console.width, WIDTH)
  try:
    with signals() as received, ProgressLine() as line:
      line.say('the links are made')
      asked = setting, systems, rates, received, line
      if study:
        cells, failed, carried = measure_study(study, *asked)
      else:
        cells, failed, carried = measure_rates(*asked)
  except Interrupted as stopped:
    console.print(f'{stopped}; no process is left')
    return 128 + stopped.number
  except LinksFailed as error:
    console.print(f'failed: {error}')
    return 1
  again = shlex.join(['python', '-m', 'tests.netbench', *sys.argv[1:]])
  if cells:
    console.print()
    for part in _shown(study, cells, setting.delay_ms):
      console.print(part)
  console.print(f'Again: {again}')
  if given.json:
    record = {
      'command': again,
      'setting': dataclasses.asdict(setting) | {'params': setting.params},
      'link_mbits': carried,
      'failed': failed,
    }
    if study:
      record['cells'] = [dataclasses.asdict(cell) for cell in cells]
    else:
      record['cells'] = link_tables.as_json(cells)
      record['mbits_needed'] = link_tables.bandwidths(cells)
    files.write_json(pathlib.Path(given.json), record)
  return 1 if failed else 0


def _shown(
  study: NetStudy | None, cells: Sequence, delay_ms: float
) -> Sequence:
  """Returns the tables, and the notes that they need."""
  if study:
    table = link_tables.study_table(study.title, cells)
    return (table, link_tables.STUDY_NOTE)
  return (
    link_tables.cell_table(cells, delay_ms),
    link_tables.bandwidth_table(cells),
    *link_tables.notes(cells, POINTS),
  )


if __name__ == '__main__':
  define_flags()
  flags.run_without_config(main)
