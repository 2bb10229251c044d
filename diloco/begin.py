# SPDX-License-Identifier: Apache-2.0
"""Begins a run with the parameters and moments of a data-parallel one.

  python -m diloco.begin --config=… --of=ONE --workdir=RUN

ONE is the folder of a run of a single learner with the batch of all: --config=…
--config.protocol.learners=1 --config.data.batch=…. Of its newest checkpoint, of
step s, this makes one of the syncer and of each learner of RUN, as if they had
made those s steps: its rows are theirs, and RUN's schedules are at s.
`launch.local` with the same --config and --workdir goes on from there.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from absl import flags, logging

from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.learner_records import HeldState, LearnerRecords
from diloco.config import flags as config_flags
from diloco.config import run_config, unlike
from diloco.config.run_config import RunConfig
from diloco.learner.replica import whole_replica
from diloco.learner.restore import progress_of
from diloco.metrics import files
from diloco.metrics.workdir import Workdir, folder_at, learner_name
from diloco.numerics import outer
from diloco.numerics.optimizers import OUTER
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.syncer.state import LearnerAccount, Ledger
from diloco.protocol.values import Ema
from diloco.run.command import run_command
from diloco.run.spec import RunSpec, make_run_spec
from diloco.syncer.outer_state import OuterState
from diloco.syncer.stats import RunStats
from diloco.syncer.storage import ShardDisk, StatesDisk, SyncerDisk

ROUNDS = 'rounds'  # Of the outer optimizer's state, where that anneals.
SAVED_S = 3600.0  # Limit for one checkpoint.

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_OF = flags.DEFINE_string('of', None, 'Folder of the run of one learner.')


def main(config: RunConfig) -> int:
  """Writes the checkpoints; 78 where they would not fit the run."""
  with config_flags.refusing(ValueError, OSError, BrokenRecord):
    one = Workdir(pathlib.Path(_OF.value))
    step = begin(config, Workdir(pathlib.Path(_WORKDIR.value)), one)
  print(f'{_WORKDIR.value} begins at step {step}', file=sys.stderr)
  return 0


@dataclasses.dataclass(frozen=True)
class Beginning:
  """Parameters and inner state that all learners begin with, on the host.

  Attributes:
    step: s, steps of all learners together that led there.
    batches: of all learners together, that were taken of the data; more than s
      where the run lost steps.
    params: path -> f32 array.
    inner: the inner optimizer's state.
  """

  step: int
  batches: int
  params: Mapping[str, np.ndarray]
  inner: Any


def begin(config: RunConfig, workdir: Workdir, one: Workdir) -> int:
  """Makes the folder of a run that begins where another one is.

  Args:
    one: of a run of one learner with the batch of all.

  Returns:
    The global step that it begins at.

  Raises:
    ValueError: the folder is in use, or the other run is not such a one.
    BrokenRecord: that has no checkpoint of this model and inner optimizer.
  """
  workdir = dataclasses.replace(
    workdir, checkpoint_folder=folder_at(config.checkpoint.folder)
  )
  in_use = workdir.root.exists() and any(workdir.root.iterdir())
  if in_use or any(path.exists() for path in workdir.saved()):
    raise ValueError(
      f'--workdir={workdir.root}: holds something, give an empty folder or '
      'one that does not exist'
    )
  run_spec = make_run_spec(config)
  setups = unlike.setups(config, config.protocol.learners)
  batches = [setup.config.data.batch for setup in setups]
  beginning = read(run_spec, sum(batches), one)
  if beginning.step >= config.protocol.total_steps:
    raise ValueError(
      f'--of={one.root}: is at step {beginning.step}, must be before '
      f'protocol.total_steps={config.protocol.total_steps}'
    )
  workdir.root.mkdir(parents=True, exist_ok=True)
  versions = _write_syncer(run_spec, workdir, beginning, batches)
  for learner, setup in enumerate(setups):
    own = dataclasses.replace(run_spec, config=setup.config)
    _write_learner(own, workdir, learner, beginning, versions)
  # The last: a folder without it is not begun.
  files.write_json(workdir.config, dataclasses.asdict(config))
  return beginning.step


def read(run_spec: RunSpec, batch: int, one: Workdir) -> Beginning:
  """Reads the newest checkpoint of a run of one learner.

  Args:
    batch: rows of a step of all learners together.

  Raises:
    ValueError: it is another kind of run, or its rows are not this run's.
    BrokenRecord: it has no checkpoint of this model and inner optimizer.
  """
  flag = f'--of={one.root}'
  try:
    config = run_config.restore(json.loads(one.config.read_text()))
  except FileNotFoundError:
    raise ValueError(f'{flag}: there is no {one.config.name}') from None
  wanted = {
    'protocol.learners': (config.protocol.learners, 1),
    'data.batch': (config.data.batch, batch),
    'data.seq_len': (config.data.seq_len, run_spec.config.data.seq_len),
    'seed': (config.seed, run_spec.config.seed),
  }
  for key, (there, here) in wanted.items():
    if there != here:
      raise ValueError(f'{flag}: has {key}={there}, must be {here}')
  there = make_run_spec(config)
  if there.text.fingerprint != run_spec.text.fingerprint:
    raise ValueError(f'{flag}: trains on another text')
  records = LearnerRecords(
    Workdir(one.root, folder_at(config.checkpoint.folder)).checkpoints(
      learner_name(0)
    ),
    0,
    there.fingerprints,
    config.checkpoint.keep_latest,
    say=logging.warning,
    owned=False,
  )
  params = {
    path: jax.ShapeDtypeStruct(shape, np.float32)
    for path, shape in run_spec.shapes.items()
  }
  inner = jax.eval_shape(run_spec.inner.init, params)
  bases = dict(enumerate(there.fragments_like()))
  saved = records.restore_state(params, inner, bases)
  if saved is None:
    raise BrokenRecord(
      f'{flag}: has no checkpoint of this model and inner optimizer'
    )
  arrays = saved.arrays
  progress = saved.meta['progress']
  return Beginning(
    progress['step'],
    math.ceil(progress['rows'] / batch),
    arrays['params'],
    arrays['optimizer'],
  )


def _write_syncer(
  run_spec: RunSpec, workdir: Workdir, beginning: Beginning, batches: list[int]
) -> tuple[int, ...]:
  """Writes the syncer's ledger and checkpoints; returns all versions."""
  config = run_spec.config
  protocol, shards = config.protocol, config.syncer.shards
  closed = beginning.step // protocol.spacing_steps
  versions = protocol.versions_at(closed)
  whole = _outer_state(run_spec, beginning, versions, None)
  for shard in range(1, shards):
    model = _outer_state(run_spec, beginning, versions, shard)
    disk = ShardDisk(run_spec, workdir, shard, model)
    disk.save(closed, wait=True)
    _close(disk)
  model = (
    _outer_state(run_spec, beginning, versions, 0) if shards > 1 else whole
  )
  disk = SyncerDisk(run_spec, workdir, model, RunStats(config))
  disk.occupy()
  ledger = Ledger(
    step=beginning.step,
    clocks=(),
    closed_round=closed,
    versions=versions,
    accounts=tuple(
      (learner, LearnerAccount(rows=beginning.batches * batch))
      for learner, batch in enumerate(batches)
    ),
    quorum_s=Ema(),
    sync_s=Ema(),
    usual_norms=(None,) * protocol.fragments,
    last_round=None,
    ended=False,
  )
  disk.save_last(ledger, whole.crcs())
  disk.commit(ledger, whole.crcs())
  _close(disk)
  return versions


def _close(disk: StatesDisk):
  if not disk.close(SAVED_S):
    raise OSError('a checkpoint of the syncer was not written')


def _outer_state(
  run_spec: RunSpec,
  beginning: Beginning,
  versions: tuple[int, ...],
  shard: int | None,
) -> OuterState:
  """Returns Θ, with an outer optimizer that has moved nothing so far."""
  model = OuterState(run_spec, shard)
  thetas = run_spec.fragments_of(beginning.params)
  for p in model.owned:
    names = model.template(p).theta
    state = outer.init({x: thetas[p][x] for x in names}, run_spec.outer)
    model.restore(
      p,
      dataclasses.replace(
        state,
        version=versions[p],
        optimizer_state=_after(run_spec, state.optimizer_state, versions[p]),
      ),
    )
  return model


def _after(run_spec: RunSpec, state: Any, rounds: int) -> Any:
  """Returns an outer optimizer's state that anneals as after so many rounds.

  Adam's count stays 0: it is of what is in its moments.
  """
  kind = OUTER.get(run_spec.config.outer.optimizer)
  counts = optax.tree_utils.tree_get_all_with_path(state, ROUNDS)
  if not (kind and kind.anneals and counts):
    return state
  return optax.tree_utils.tree_set(state, **{ROUNDS: np.int32(rounds)})


def _write_learner(
  run_spec: RunSpec,
  workdir: Workdir,
  learner: int,
  beginning: Beginning,
  versions: tuple[int, ...],
):
  """Writes the checkpoint of one learner, at its step s."""
  config, step = run_spec.config, beginning.step
  bases = run_spec.fragments_of(beginning.params)
  crcs = whole_replica(run_spec, bases, versions).crcs()
  rows = beginning.batches * config.data.batch
  # No tokens: what led there was trained by another.
  start = Start(
    source='the beginning',
    crcs=tuple(crcs),
    versions=versions,
    from_steps=(step,) * len(versions),
    from_tokens=(0,) * len(versions),
    step=step,
    rows=rows,
    closed_round=step // config.protocol.spacing_steps,
    global_step=step,
  )
  records = LearnerRecords(
    workdir.checkpoints(learner_name(learner)),
    learner,
    run_spec.fingerprints,
    config.checkpoint.keep_latest,
    say=logging.warning,
  )
  progress = progress_of(start.state(), rows, 0, tuple(crcs))
  held = HeldState(dict(beginning.params), beginning.inner)
  records.save_state(step, held, lambda: dict(enumerate(bases)), progress)
  records.close(SAVED_S)
  if records.failed or not records.wait(0.0):
    raise OSError(f'the checkpoint of learner {learner} was not written')


if __name__ == '__main__':
  run_command(main, required=('workdir', 'of'))
