# SPDX-License-Identifier: Apache-2.0
"""The layout of a run's folder.

config.json          the whole configuration as it was run
status.json          the syncer's state, replaced about every second
summary.json         written by the syncer when the run ends
evaluation.json      written by `python -m diloco.evaluate`
tape.jsonl           the syncer's event log; its older parts: tape.jsonl.NNNNNN
event logs/NAME.jsonl     the event log of one learner, over all its processes
events.jsonl         starts, deaths and kills of processes
pids.json            the processes that the launcher started
loss.png             the loss plot
sample.txt           what the final model writes, by `diloco train`
result.json          the result, where the run is one of a sweep
metrics/NAME.jsonl   scalars of one process
tensorboard/NAME/    the same for TensorBoard
profiles/NAME/       traces of inner steps by jax.profiler, if asked for
logs/NAME.log        output of one process, over all its starts
compiled/            compiled programs, shared by all processes
syncer/              what a restarted syncer resumes from
checkpoints/NAME/    what a restarted learner resumes from
checkpoints/lab/     what an interrupted run of the lab resumes from
parameters/          the final parameters of the global model
requests/            what a command asks of the launcher, until it is done
chaos/               the plan, the faults and the verdict of `launch.chaos`
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping

_NAMES: list[str] = []  # Of files and folders that are properties.


def _inside(name: str) -> property:
  """Returns a property: the path of a file or folder of that name."""
  _NAMES.append(name)

  def path(self) -> pathlib.Path:
    return self.root / name

  return property(path)


@dataclasses.dataclass(frozen=True)
class Workdir:
  """Paths of one run; creates nothing."""

  root: pathlib.Path

  config = _inside('config.json')
  status = _inside('status.json')
  summary = _inside('summary.json')
  evaluation = _inside('evaluation.json')
  tape = _inside('tape.jsonl')
  tapes = _inside('tapes')  # Folder of the learners' tapes.
  events = _inside('events.jsonl')
  pids = _inside('pids.json')
  lock = _inside('lock')
  loss_plot = _inside('loss.png')
  sample = _inside('sample.txt')
  result = _inside('result.json')  # Of a run of a sweep; see `sweeps.sweep`.
  compiled = _inside('compiled')
  syncer = _inside('syncer')
  chaos = _inside('chaos')  # What faults were planned, performed and judged.
  parameters = _inside('parameters')

  @property
  def data(self) -> Mapping:
    """The section `data` of the configuration; empty if there is none yet."""
    if not self.config.exists():
      return {}
    return json.loads(self.config.read_text())['data']

  # All that a run may leave: `launch` removes these, and nothing else.
  CONTENTS = (
    *_NAMES,
    *('metrics', 'tensorboard', 'profiles', 'logs', 'checkpoints'),
    'requests',  # Of 0.1.0.
  )

  @classmethod
  def owns(cls, name: str) -> bool:
    """Returns True if a run leaves a file or folder of this name.

    That includes parts of growing files, and files that were being written when
    their process died or the disk was full.
    """
    stem = re.sub(r'(\.\d+(\.tmp)?|\.orbax-checkpoint-tmp.*)$', '', name)
    return stem in cls.CONTENTS

  def syncer_shard(self, shard: int) -> pathlib.Path:
    """Returns the folder that a shard resumes from; shard 0 is the leader's."""
    return self.syncer / f'shard-{shard}' if shard else self.syncer

  def learner_tape(self, learner: int) -> pathlib.Path:
    return self.tapes / f'{learner_name(learner)}.jsonl'

  def checkpoints(self, process: str) -> pathlib.Path:
    """Returns the folder of one learner, such as 'learner-0'."""
    return self.root / 'checkpoints' / process

  def learner_checkpoints(self) -> list[pathlib.Path]:
    """Returns the folders of all learners that have saved."""
    return sorted(self.root.glob('checkpoints/learner-*'))

  def metrics(self, process: str) -> pathlib.Path:
    """Returns the JSONL file of one process, such as 'learner-0'."""
    return self.root / 'metrics' / f'{process}.jsonl'

  def tensorboard(self, process: str) -> pathlib.Path:
    return self.root / 'tensorboard' / process

  def profiles(self, process: str) -> pathlib.Path:
    return self.root / 'profiles' / process

  def log(self, process: str) -> pathlib.Path:
    return self.root / 'logs' / f'{process}.log'


def learner_name(learner: int, host: int = 0) -> str:
  """Returns the name of a learner's process, also used for its files.

  Args:
    host: number of the process, of a learner of several; the first has the
      learner's own name.
  """
  return f'learner-{learner}.{host}' if host else f'learner-{learner}'


def shard_name(shard: int) -> str:
  """Returns the name of the process of a shard that does not lead."""
  return f'shard-{shard}'


SYNCER = 'syncer'
EVALUATOR = 'evaluator'  # The process that follows the syncer's checkpoints.
