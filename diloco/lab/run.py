# SPDX-License-Identifier: Apache-2.0
"""One run of the lab, of the system that is configured."""

import math
import pathlib
import sys
import time
import zlib
from collections.abc import Callable, Mapping

import jax
import numpy as np

from diloco.checkpoint.parameters import write_parameters
from diloco.config.lab_section import SYSTEMS
from diloco.config.run_config import UNLIKE, RunConfig
from diloco.config.sections import ConfigError
from diloco.lab import failure_schedule
from diloco.lab.checkpoints import LabCheckpoints
from diloco.lab.data_parallel import DataParallel
from diloco.lab.decoupled import Decoupled
from diloco.lab.outputs import LabObserver, Recording, ShownProgress, Trained
from diloco.metrics.workdir import Workdir
from diloco.run.spec import RunSpec, make_run_spec
from diloco.sweeps import code, sweep

# One training run in one process, in simulated time, with reproducible bits.
#
# Decoupled DiLoCo is the real machines around real arrays. Data-parallel is the
# same inner step on the batches of all learners at once; a learner alone is
# that with one of them.


def train(
  run_spec: RunSpec,
  timeline_s: float = 0.0,
  observer: LabObserver | None = None,
  checkpoints: LabCheckpoints | None = None,
) -> Trained:
  """Makes the run that the configuration describes.

  Args:
    run_spec: its configuration's section `lab` names the system.
    timeline_s: events before this time are kept for a picture, in
      `Trained.tally`; of data-parallel, none are.
    observer: receives all events from where the run begins or resumes.
    checkpoints: where the run resumes, and what it saves for the next process;
      None: it starts anew, and saves nothing.

  Raises:
    ConfigError: a fault of `config.faults` is impossible in this system, or
      it has no unlike learners.
  """
  kills = failure_schedule.plan(run_spec.config)
  has_syncer = SYSTEMS[run_spec.config.lab.system].has_syncer
  is_decoupled = has_syncer and not run_spec.config.lab.start_fraction
  if run_spec.config.unlike_learners and not is_decoupled:
    raise ConfigError(f'{UNLIKE}: data-parallel has one batch and one mesh')
  program = (Decoupled if has_syncer else DataParallel)(
    run_spec,
    kills,
    timeline_s,
    observer or LabObserver(),
    checkpoints or LabCheckpoints(),
  )
  return program.run()


def make(
  config: RunConfig,
  workdir: pathlib.Path,
  compiled: pathlib.Path | None,
  keeps_model: bool = True,
  say: Callable[[str], object] | None = print,
) -> None:
  """Makes a run, and what it leaves in its folder.

  Args:
    workdir: folder of the run, whose name is its label.
    compiled: compilation cache, unless `run.compilation_cache` is off; None:
      there is none.
    keeps_model: whether the final parameters stay in the folder, as those of
      a run of processes do.
    say: takes the loss, and a CRC of the parameters; None: nothing is shown.

  Raises:
    ConfigError: it can't be run.
  """
  began_s = time.monotonic()
  # One that the user's environment names is used as it is.
  wanted = compiled and config.run.compilation_cache
  if wanted and not jax.config.jax_compilation_cache_dir:
    jax.config.update('jax_compilation_cache_dir', str(compiled.absolute()))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  failure_schedule.plan(config)  # Before anything is written.
  try:
    run_spec = make_run_spec(config)
  except (ValueError, FileNotFoundError) as error:
    raise ConfigError(str(error)) from None
  learners = SYSTEMS[config.lab.system].learners(config.protocol.learners)
  checkpoints = LabCheckpoints(Workdir(workdir).checkpoints('lab'), config)
  place = None
  if checkpoints.from_step:
    if say:
      print(f'goes on from step {checkpoints.from_step}', file=sys.stderr)
    place = checkpoints.state['observer']
  steps = config.protocol.total_steps
  shown = ShownProgress(learners, steps) if say else LabObserver()
  observer = Recording(workdir, config, place, shown)
  code.fingerprint()  # Of what is about to run, not of later changes.
  try:
    trained = train(run_spec, observer=observer, checkpoints=checkpoints)
  finally:
    checkpoints.close()
    observer.close()
  wall_s = checkpoints.earlier_s + time.monotonic() - began_s
  if keeps_model:
    write_parameters(Workdir(workdir).parameters, trained.parameters)
  sweep.write_into(workdir, result_of(trained, wall_s))
  checkpoints.finish()
  if not say:
    return
  say(f'loss {trained.loss:.4f} nats per token')
  say(f'parameters {crc(trained.parameters):08x}')


def result_of(trained: Trained, wall_s: float) -> sweep.SeedResult:
  """Returns a run's result as a sweep keeps it."""
  last = trained.points[-1]
  average = last.average_loss
  return sweep.SeedResult(
    loss=trained.loss,
    learners_loss=last.learners_loss,
    average_loss=None if math.isnan(average) else average,
    halves=last.halves,
    curve=tuple((p.step, p.tokens, p.loss) for p in trained.points),
    rounds=trained.rounds,
    participation=trained.participation,
    goodput=trained.goodput,
    wall_s=wall_s,
    merged_tokens=trained.merged_tokens,
    unexplained_tokens=trained.unexplained_tokens,
    age_steps=trained.age_steps,
    old_share=trained.old_share,
    delay_steps=trained.tally.mean_delay_steps,
    code=code.fingerprint(),
  )


def crc(parameters: Mapping[str, np.ndarray]) -> int:
  """Returns a CRC by which the results of two runs can be compared."""
  crc = 0
  for _, array in sorted(parameters.items()):
    crc = zlib.crc32(np.ascontiguousarray(array), crc)
  return crc
