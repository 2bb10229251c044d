# SPDX-License-Identifier: Apache-2.0
"""Results of runs that are kept beside their experiment, as a small JSON file.

A sweep of `experiments/NAME.py` as it stands, without an argument or another
flag of --config, finds in `experiments/records/NAME.json` the runs that were
made before, on whichever machine, and adds those that it makes. A run counts
for a variant if it had the same configuration, whatever it was called then, and
whichever of the experiments made it: what several compare with is made once.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping

from diloco.config import run_config, sections
from diloco.metrics import files
from diloco.sweeps import sweep
from diloco.sweeps.sweep import BadResult, SeedResult

FOLDER = 'records'  # Beside the experiments.
DIGITS = 7  # Of a number in the file.
OF_A_RUN = ('name', 'seed')  # Keys that may differ between equal runs.

Flat = Mapping[str, object]  # Key of a configuration -> value, as of JSON.
# Label, seed, what differs from the first run's configuration, and the result.
Run = tuple[str, int, dict[str, object], SeedResult]


def path_of(experiment: str) -> pathlib.Path | None:
  """Returns the file of an experiment's runs; None: none are kept there."""
  path = pathlib.Path(experiment)
  folder = path.parent / FOLDER
  return folder / f'{path.stem}.json' if folder.is_dir() else None


class Records:
  """The runs of one file.

  Attributes:
    runs: in the order in which they were made.

  Args:
    path: None: nothing is found or kept.

  Raises:
    BadResult: the file, or one beside it, is not one that this writes.
  """

  def __init__(self, path: pathlib.Path | None):
    self.path = path
    self._base, self.runs = {}, []
    if path is not None and path.exists():
      self._base, self.runs = _read(path)
    self._of_others = [
      _read(other)
      for other in (sorted(path.parent.glob('*.json')) if path else ())
      if other != path
    ]

  @property
  def seeds(self) -> tuple[int, ...]:
    """The seeds of which there are runs, ascending."""
    return tuple(sorted({seed for _, seed, _, _ in self.runs}))

  def find(
    self, config: Flat, seed: int, changed: Iterable[str] = ()
  ) -> SeedResult | None:
    """Returns the newest result of a configuration and a seed, if any.

    The experiment's own come before those of the others beside it.

    Args:
      changed: see `differing`.
    """
    for base, runs in ((self._base, self.runs), *self._of_others):
      for _, of, changes, result in reversed(runs):
        if of == seed and not differing(config, base | changes, changed):
          return result
    return None

  def add(self, label: str, seed: int, config: Flat, result: SeedResult):
    """Adds a run in place of one with the same seed and configuration."""
    if self.path is None:
      return
    config = {k: x for k, x in config.items() if k not in OF_A_RUN}
    self._base = self._base or config
    changes = {
      key: config.get(key)
      for key in sorted({*self._base, *config})
      if self._base.get(key) != config.get(key)
    }
    self.runs = [
      run for run in self.runs if (run[1], run[2]) != (seed, changes)
    ]
    self.runs.append((label, seed, changes, result))
    files.replace(self.path, self._text().encode())

  def _text(self) -> str:
    """Returns the file: a run on each line, so that changes can be read."""
    runs = ',\n'.join(_line(*run) for run in self.runs)
    base = json.dumps(self._base, sort_keys=True)
    return f'{{"config": {base},\n"runs": [\n{runs}\n]}}\n'


def _read(path: pathlib.Path) -> tuple[dict[str, object], list[Run]]:
  """Returns the first run's configuration, and the runs."""
  runs = []
  try:
    content = json.loads(path.read_text())
    for run in content['runs']:
      label, seed = run.pop('label'), run.pop('seed')
      changes = run.pop('changes')
      runs.append((label, seed, changes, sweep.result_of(run)))
    return content['config'], runs
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise BadResult(f'{path}: does not list runs: {error}') from None


def flat(config: run_config.RunConfig) -> dict[str, object]:
  """Returns a configuration as JSON has it, by flat key."""
  plain = json.loads(json.dumps(dataclasses.asdict(config)))
  return sections.flatten(plain)


def differing(
  here: Flat, there: Flat, changed: Iterable[str] = ()
) -> dict[str, tuple[object, object]]:
  """Returns values there and here of the keys by which two runs differ.

  Args:
    changed: keys that count, too, where `there` is from before they existed.
  """
  there = run_config.with_current_blend(dict(there), sections.BLEND)
  absent = here.keys() - there.keys() - {*changed}
  return {
    key: (there.get(key), here.get(key))
    for key in sorted(here.keys() | there.keys())
    if key not in absent
    and key not in OF_A_RUN
    and here.get(key) != there.get(key)
  }


def _line(label: str, seed: int, changes: Flat, result: SeedResult) -> str:
  fields = {
    name: _rounded(value)
    for name, value in sweep.fields_of(result).items()
    if value is not None and value != {} and value == value  # Not NaN.
  }
  return json.dumps(
    {'label': label, 'seed': seed, 'changes': changes, **fields}
  )


def _rounded(value):
  match value:
    case float():
      return float(f'{value:.{DIGITS}g}')
    case dict():
      return {key: _rounded(each) for key, each in value.items()}
    case list() | tuple():
      return [_rounded(each) for each in value]
  return value
