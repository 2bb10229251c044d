# SPDX-License-Identifier: Apache-2.0
"""Tapes for the tests: written by hand, copied, changed."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping

from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir
from diloco.run import tape_events

MACHINE = tape_events.Machine('0', 'cpu', 'cpu', 1, 1, 2, 2, '')


def line(time_s: float, said) -> dict:
  """A line as the writers of `run/tape_events.py` make it."""
  fields = {'time_s': time_s, 'kind': tape_events.kind_of(said)}
  return fields | dataclasses.asdict(said)


def write(
  folder: pathlib.Path, syncer: list[dict], learners: Mapping[int, list[dict]]
) -> Workdir:
  """Writes the tapes of a run into an empty folder."""
  workdir = Workdir(folder)
  workdir.tapes.mkdir()
  paths = {workdir.learner_tape(m): lines for m, lines in learners.items()}
  for path, lines in {workdir.tape: syncer, **paths}.items():
    path.write_text(''.join(json.dumps(each) + '\n' for each in lines))
  return workdir


def changed(
  workdir: Workdir,
  folder: pathlib.Path,
  syncer: Callable[[list[dict]], list[dict]] = lambda lines: lines,
  learner: Callable[[list[dict]], list[dict]] = lambda lines: lines,
) -> Workdir:
  """A copy of a run's tapes; `learner` changes that of learner 1."""
  copied = write(folder, syncer(read_jsonl(workdir.tape)), {})
  for path in workdir.tapes.iterdir():
    shutil.copy(path, copied.tapes)
  mine = learner(read_jsonl(workdir.learner_tape(1)))
  text = ''.join(json.dumps(each) + '\n' for each in mine)
  copied.learner_tape(1).write_text(text)
  return copied
