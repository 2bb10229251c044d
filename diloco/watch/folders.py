# SPDX-License-Identifier: Apache-2.0
"""Recognises folders of runs and of sweeps, and makes one page of them."""

import pathlib
from collections.abc import Sequence

from diloco.metrics.recorded_run import FollowedRun, NoReport
from diloco.metrics.status import RunStatus
from diloco.metrics.workdir import Workdir
from diloco.pages.parts import Part, ReportPage
from diloco.sweeps.sweep import BadResult
from diloco.watch import run_page, sweep_page


class FollowedFolders:
  """Runs and sweeps whose page is made anew at each call.

  A run is only read on, a sweep is read as a whole.

  Args:
    folders: each of a run or of a sweep.
    command: makes the page again.

  Raises:
    NoReport: one of them is neither; says what is wrong with each such.
  """

  def __init__(self, folders: Sequence[pathlib.Path], command: str = ''):
    self._folders = tuple(folders)
    self._labels = _labels(folders)
    self._command = command
    self._runs: list[FollowedRun] = []
    self._sweeps: list[tuple[pathlib.Path, str]] = []
    problems = []
    for folder, label in zip(folders, self._labels, strict=True):
      try:
        if Workdir(folder).config.exists():
          run = FollowedRun(folder, label if len(folders) > 1 else '')
          self._runs.append(run)
        elif sweep_page.is_sweep(folder):
          sweep_page.read(folder, label)
          self._sweeps.append((folder, label))
        else:
          problems.append(_neither(folder))
      except (NoReport, BadResult) as error:
        problems.append(str(error))
    if problems:
      raise NoReport('\n'.join(problems))

  @property
  def status(self) -> RunStatus | None:
    """The status of a single run, as its page has it; None: not known."""
    return self._runs[0].status if len(self._runs) == 1 else None

  def page(self) -> ReportPage:
    """Returns the page: runs share their charts, each sweep follows them."""
    runs, head = self._runs, {}
    for run in runs:
      run.update()
    sweeps = [sweep_page.read(*each) for each in self._sweeps]
    parts: list[Part] = [*run_page.sections(runs)] if runs else []
    paragraphs = [*run_page.sentences(runs)]
    for i, sweep in enumerate(sweeps):
      parts += sweep_page.sections(sweep, f'-{i}' if len(sweeps) > 1 else '')
      paragraphs += sweep_page.sentences(sweep)
    if len(self._folders) == 1:
      head = run_page.head(runs[0]) if runs else sweep_page.head(sweeps[0])
    return ReportPage(
      **{'name': self._labels[0], 'title': ', '.join(self._labels), **head},
      command=self._command,
      paragraphs=tuple(paragraphs),
      parts=tuple(parts),
      problem=run_page.problems(runs),
    )


def _neither(folder: pathlib.Path) -> str:
  if not folder.is_dir():
    return f'{folder}: is no folder'
  return (
    f'{folder}: holds neither a run (there is no config.json) nor results of '
    'a sweep (there is no LABEL/seed-N)'
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
