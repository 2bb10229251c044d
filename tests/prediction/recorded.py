# SPDX-License-Identifier: Apache-2.0
"""Writes the folder of a small run as a real one leaves it, times by hand."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.metrics import files, names
from diloco.metrics.goodput import LearnerWork
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import JsonlWriter
from experiments import tests_tiny


def config(learners: int = 2) -> RunConfig:
  return run_config.build(tests_tiny.get_config(f'learners={learners}'))


BEGAN_S = 1_700_000_000.0  # When the first learner was ready.
STEP_S = 0.125
TOKENS = 4 * 32  # Of a step: see experiments/tests_tiny.py.
STALL_S = 0.0125  # Of each step: a tenth.
ROUND_S = 0.25
FIRST_START_S = 12.0
QUORUM_S = 0.05
GRACE_S = 0.1
LOSS = 2.0  # Of every step.

# Killed at, started at, first step at; multiples of STEP_S.
Absence = tuple[float, float, float]


def write(
  root: pathlib.Path,
  until_s: float,
  away: Mapping[int, Sequence[Absence]],
  every: int = 1,
  learners: int = 2,
) -> Workdir:
  """Learners step all the time but while they are away.

  Args:
    root: its folder, not there yet.
    until_s: when the run was over; a multiple of STEP_S.
    away: of each learner, in the order of time.
    every: of so many steps of a process one is written, and the first.
    learners: M.
  """
  workdir = Workdir(root)
  root.mkdir()
  files.write_json(workdir.config, dataclasses.asdict(config(learners)))
  events = [event(-FIRST_START_S, 'syncer', 'started', 'start 1')]
  tape = [line(-1.0, 'Started'), line(0.0, 'ready', learner=0)]
  for m in range(learners):
    name, absences = learner_name(m), away.get(m, ())
    events.append(event(-FIRST_START_S, name, 'started', 'start 1'))
    tape.append(line(-0.5, 'joined', learner=m))
    for i, (killed_s, started_s, stepped_s) in enumerate(absences, start=2):
      events += [
        event(killed_s, name, 'killed', 'SIGKILL, planned'),
        event(killed_s + 0.05, name, 'exited', 'died of SIGKILL; restart'),
        event(started_s, name, 'started', f'start {i}'),
      ]
      tape.append(line(stepped_s - 0.05, 'joined', learner=m))
    writer = JsonlWriter(workdir.metrics(name))
    begins = [0.0, *(stepped_s for *_, stepped_s in absences)]
    ends = [*(killed_s for killed_s, *_ in absences), until_s]
    for begin_s, end_s in zip(begins, ends, strict=True):
      for step in range(1, round((end_s - begin_s) / STEP_S) + 1):
        if step % every == 0 or step == 1:
          writer.write_scalars(step, scalars(begin_s + step * STEP_S - 1e-3))
    writer.close()
  for r in range(1, round(until_s / ROUND_S)):
    tape += closed(r, r % learners)
  tape.append(worked(until_s, away, learners))
  tape.append(line(until_s, 'End'))
  events.append(event(until_s + 0.2, 'syncer', 'exited', 'exited with code 0'))
  append(workdir.events, *sorted(events, key=lambda e: e[names.TIME]))
  append(workdir.tape, *sorted(tape, key=lambda e: e[names.TIME]))
  return workdir


def worked(
  at_s: float, away: Mapping[int, Sequence[Absence]], learners: int
) -> dict:
  """No step was lost; see `write`."""
  works = []
  for m in range(learners):
    away_s = sum(back_s - killed_s for killed_s, _, back_s in away.get(m, ()))
    made_s = (at_s - away_s) * (1 - STALL_S / STEP_S)
    works.append(LearnerWork(m, BEGAN_S - 0.5, 1, made_s=made_s))
  found = [dataclasses.asdict(each) for each in works]
  return line(at_s, 'Worked', begin_s=BEGAN_S, learners=found)


def closed(r: int, learner: int) -> list[dict]:
  """The lines of a round that merged one learner, a version behind if r is 2.

  After QUORUM_S it had its quorum, GRACE_S later its window was over.
  """
  share = {
    'learner': learner,
    'weight': 1.0,
    'age_s': 0.5,
    'base_version': r - (2 if r == 2 else 1),
  }
  both = {'round': r, 'version': r, 'step': r, 'shares': [share]}
  waits = {'quorum_s': QUORUM_S, 'grace_s': GRACE_S}
  return [
    line(ROUND_S * r - 1e-3, 'Merge', **both, **waits, reason='all 1 are in'),
    line(ROUND_S * r, 'Publish', **both, sync_s=0.01),
  ]


def event(at_s: float, process: str, kind: str, detail: str) -> dict:
  return {
    names.TIME: BEGAN_S + at_s,
    'process': process,
    'event': kind,
    'pid': 1,
    'detail': detail,
  }


def line(at_s: float, kind: str, **said) -> dict:
  return {names.TIME: BEGAN_S + at_s, 'kind': kind, **said}


def scalars(end_s: float) -> dict[str, float]:
  return {
    names.TIME: BEGAN_S + end_s,
    names.STEP_TIME: STEP_S,
    names.STALL_TIME: STALL_S,
    names.TRAIN_LOSS: LOSS,
    names.TOKENS_PER_S: TOKENS / STEP_S,
  }


def append(path: pathlib.Path, *records: Mapping):
  with path.open('a') as file:
    file.writelines(json.dumps(record) + '\n' for record in records)
