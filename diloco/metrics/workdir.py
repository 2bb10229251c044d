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
syncer/states/       checkpoints of its state
checkpoints/NAME/    what a restarted learner resumes from
checkpoints/lab/     what an interrupted run of the lab resumes from
parameters/          the final parameters of the global model
pretrained/          config.json and tokenizer that came with the first ones
requests/            what a command asks of the launcher, until it is done
chaos/               the plan, the faults and the verdict of `launch.chaos`

With `checkpoint.folder` the checkpoints lie there instead, by process: syncer/,
shard-1/, learner-0/.
"""

import dataclasses
import json
import os
import pathlib
import re
import socket
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
  """Paths of one run; creates nothing.

  Attributes:
    checkpoint_folder: `folder_at` the run's `checkpoint.folder`; needed by what
      reads or writes checkpoints.
  """

  root: pathlib.Path
  checkpoint_folder: pathlib.Path | None = None

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
  pretrained = _inside(
    'pretrained'
  )  # Files of `model.init_from`, for an export.

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
    return (self.checkpoint_folder or self.root / 'checkpoints') / process

  def learner_checkpoints(self) -> list[pathlib.Path]:
    """Returns the folders of all learners that have saved."""
    return sorted(self.checkpoints('').glob('learner-*'))

  def states(self, shard: int = 0) -> pathlib.Path:
    """Returns the folder of a shard's checkpoints; shard 0 is the leader."""
    if self.checkpoint_folder:
      return self.checkpoints(shard_name(shard) if shard else SYNCER)
    return self.syncer_shard(shard) / 'states'

  def saved(self) -> list[pathlib.Path]:
    """Returns the folders that hold all checkpoints, as far as there are."""
    if self.checkpoint_folder:
      root, names = self.checkpoint_folder, (SYNCER, 'shard-*', 'learner-*')
    else:
      root = self.root
      names = 'checkpoints', 'syncer/states/*', 'syncer/shard-*/states/*'
    return [path for name in names for path in root.glob(name)]

  def metrics(self, process: str) -> pathlib.Path:
    """Returns the JSONL file of one process, such as 'learner-0'."""
    return self.root / 'metrics' / f'{process}.jsonl'

  def tensorboard(self, process: str) -> pathlib.Path:
    return self.root / 'tensorboard' / process

  def profiles(self, process: str) -> pathlib.Path:
    return self.root / 'profiles' / process

  def log(self, process: str) -> pathlib.Path:
    return self.root / 'logs' / f'{process}.log'


def folder_at(path: str) -> pathlib.Path | None:
  """Returns the path of a folder, in a bucket by etils.epath; None for ''."""
  if '://' not in path:
    return pathlib.Path(path) if path else None
  import fsspec  # Not at the top: few runs need it, and it takes long.
  from etils import epath

  # Others write there, too; before epath makes its only instance.
  fsspec.config.conf.setdefault('gcs', {})['use_listings_cache'] = False
  return epath.Path(path)


def check_folder(folder: str) -> None:
  """Checks that this process can write to `checkpoint.folder`, and remove.

  Raises:
    ValueError: names the value and what is wrong.
  """
  path = folder_at(folder)
  if path is None:
    return
  try:
    if isinstance(path, pathlib.Path):  # Else it would make the bucket, too.
      path.mkdir(parents=True, exist_ok=True)
    probe = path / f'.{socket.gethostname()}.{os.getpid()}'
    probe.write_text('probe')
    probe.unlink()
  # Each package by which epath reaches buckets has errors of its own.
  except Exception as error:  # noqa: BLE001 - said in one line.
    advice = ": pip install 'diloco[gcs]'" * isinstance(error, ImportError)
    what = ' '.join(f'{type(error).__name__}: {error}'.split())
    raise ValueError(
      f'checkpoint.folder={folder!r}: can not be written to: {what}{advice}'
    ) from None


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
