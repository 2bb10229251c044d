# SPDX-License-Identifier: Apache-2.0
"""Recognises folders of runs and of sweeps, and makes one page of several."""

import pathlib
from collections.abc import Sequence

from diloco.metrics import run_reader
from diloco.metrics.recorded_run import NoReport
from diloco.metrics.workdir import Workdir
from diloco.pages.parts import Part, ReportPage
from diloco.report import run_report, sweep_reader, sweep_report
from diloco.sweeps.sweep import BadResult


def report(
  folders: Sequence[pathlib.Path], name: str, command: str
) -> ReportPage:
  """The page of all these folders: runs in common charts, then each sweep.

  Args:
    folders: each of a run or of a sweep.

  Raises:
    NoReport: one of them is neither; says what is wrong with each such.
  """
  labels = _labels(folders)
  runs, sweeps, problems = [], [], []
  for folder, label in zip(folders, labels, strict=True):
    try:
      if Workdir(folder).config.exists():
        runs.append(run_reader.read(folder, label))
      elif sweep_reader.is_sweep(folder):
        sweeps.append(sweep_reader.read(folder, label))
      else:
        problems.append(_neither(folder))
    except (NoReport, BadResult) as error:
      problems.append(str(error))
  if problems:
    raise NoReport('\n'.join(problems))
  parts: list[Part] = []
  paragraphs: list[str] = []
  if runs:
    parts += run_report.parts(runs)
    paragraphs += run_report.paragraphs(runs)
  for i, sweep in enumerate(sweeps):
    suffix = f'-{i}' if len(sweeps) > 1 else ''
    parts += sweep_report.parts(sweep, suffix)
    paragraphs += sweep_report.paragraphs(sweep)
  return ReportPage(
    name=name,
    title=_title(labels, len(runs), len(sweeps)),
    command=command,
    paragraphs=tuple(paragraphs),
    parts=tuple(parts),
  )


def _neither(folder: pathlib.Path) -> str:
  if not folder.is_dir():
    return f'{folder}: is no folder'
  return (
    f'{folder}: holds neither a run (there is no config.json) nor results of '
    'a sweep (there is no result.json, nor LABEL/seed-N)'
  )


def _labels(folders: Sequence[pathlib.Path]) -> list[str]:
  """Names of the folders; as much of their paths as tells them apart."""
  paths = [folder.resolve().parts for folder in folders]
  many = 1
  while len({path[-many:] for path in paths}) < len(set(paths)) and many < max(
    map(len, paths)
  ):
    many += 1
  return ['/'.join(path[-many:]) for path in paths]


def _title(labels: Sequence[str], runs: int, sweeps: int) -> str:
  said = []
  if runs:
    said.append('a run' if runs == 1 else f'{runs} runs')
  if sweeps:
    said.append('a sweep' if sweeps == 1 else f'{sweeps} sweeps')
  if len(labels) == 1:
    return f'{labels[0]}: {said[0]}'
  return ' and '.join(said).capitalize()
