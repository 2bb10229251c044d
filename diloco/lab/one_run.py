# SPDX-License-Identifier: Apache-2.0
"""Makes one run of the lab, with progress, in its folder."""

import pathlib
import sys
import time
import zlib
from collections.abc import Mapping

import jax
import numpy as np

from diloco.config import RunConfig
from diloco.config_values import ConfigError
from diloco.lab import faults, sweep
from diloco.lab.answers import Diverged
from diloco.lab.bar import Bar
from diloco.lab.journal import Journals
from diloco.lab.recording import Recording
from diloco.lab.resumption import KeptResumption, Resumption
from diloco.lab.training import train
from diloco.metrics.workdir import Workdir
from diloco.runtime.blueprint import make_blueprint


def make(
  config: RunConfig, workdir: pathlib.Path, compiled: pathlib.Path
) -> int:
  """Makes a run; returns exit code 0.

  Args:
    workdir: folder of the run, whose name is its label.
    compiled: compilation cache, unless `run.compilation_cache` is off.

  Raises:
    ConfigError: it can't be run.
  """
  began_s = time.monotonic()
  if config.run.compilation_cache:
    jax.config.update('jax_compilation_cache_dir', str(compiled.absolute()))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  faults.plan(config)  # Before anything is written.
  try:
    blueprint = make_blueprint(config)
  except (ValueError, FileNotFoundError) as error:
    raise ConfigError([str(error)]) from None
  learners = 1 if config.lab.system == 'alone' else config.protocol.learners
  journal = Journals(
    [
      Recording(workdir, config),
      Bar(learners, config.protocol.total_steps),
    ]
  )
  resumption = Resumption()
  if config.lab.checkpoint_steps:
    kept = Workdir(workdir).checkpoints('lab')
    resumption = KeptResumption(kept, config)
  if resumption.from_step:
    print(f'goes on from step {resumption.from_step}', file=sys.stderr)
  try:
    trained = train(blueprint, journal=journal, resumption=resumption)
  except Diverged as error:
    raise ConfigError(
      [
        f'--workdir={workdir}: holds a run that was cut, which this program '
        f'makes otherwise ({error}): remove checkpoints/lab, or use another'
      ]
    ) from None
  finally:
    resumption.close()
    journal.close()
  result = sweep.Result(
    loss=trained.loss,
    learners_loss=trained.points[-1].learners_loss,
    curve=tuple((p.step, p.tokens, p.loss) for p in trained.points),
    rounds=trained.rounds,
    participation=trained.participation,
    goodput=trained.goodput,
    wall_s=resumption.earlier_s + time.monotonic() - began_s,
    health=tuple(p.health for p in trained.points),
    merged_tokens=trained.merged_tokens,
    unexplained_tokens=trained.unexplained_tokens,
    age_steps=trained.age_steps,
    old_share=trained.old_share,
    delay_steps=trained.tally.mean_delay_steps,
  )
  sweep.write_into(workdir, result)
  resumption.finish()
  print(f'loss {trained.loss:.4f} nats per token')
  print(f'parameters {crc(trained.parameters):08x}')
  return 0


def crc(parameters: Mapping[str, np.ndarray]) -> int:
  """Returns a CRC by which the results of two runs can be compared."""
  crc = 0
  for _, array in sorted(parameters.items()):
    crc = zlib.crc32(np.ascontiguousarray(array), crc)
  return crc
