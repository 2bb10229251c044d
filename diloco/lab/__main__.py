# SPDX-License-Identifier: Apache-2.0
"""Trains many learners in one process: python -m diloco.lab --config=…

  python -m diloco.lab --config=experiments/NAME.py --workdir=DIR
  python -m diloco.lab --config=experiments/NAME.py --workdir=DIR --sweep \\
    [--seeds=3] [--jobs=2] [--only=TEXT]

The first makes one run. The second makes those of the file's `sweep(add)`,
over several seeds, some at a time; what was finished before is not made again.
Exit code 78: it can't run as configured.
"""

import os
import pathlib
import runpy
import sys
import time

from absl import flags as absl_flags

from diloco import flags
from diloco.config_values import ConfigError
from diloco.lab import sweep

_WORKDIR = absl_flags.DEFINE_string('workdir', None, 'Folder of the results.')
_SWEEP = absl_flags.DEFINE_bool('sweep', False, 'All variants of the file.')
_SEEDS = absl_flags.DEFINE_integer(
  'seeds', 3, 'Of each variant.', lower_bound=1
)
_JOBS = absl_flags.DEFINE_integer(
  'jobs', 2, 'Runs at a time, one thread each.', lower_bound=1
)
_ONLY = absl_flags.DEFINE_string('only', '', 'Variants whose label has this.')


def main(_) -> int:
  workdir = pathlib.Path(_WORKDIR.value)
  if _SWEEP.value:
    from diloco.lab import sweep_runs

    path = flags.config_file()
    make = runpy.run_path(path).get('sweep')
    if make is None:
      flags.exit_config(ConfigError([f'--config={path}: has no sweep(add)']))
    try:
      rows = [v for v in sweep.variants(make) if _ONLY.value in v.label]
    except ValueError as error:
      flags.exit_config(ConfigError([str(error)]))
    return sweep_runs.make(rows, _SEEDS.value, _JOBS.value, workdir)
  return _one(workdir)


def _one(workdir: pathlib.Path) -> int:
  """One run, whose label is the folder's name."""
  config = flags.load()
  from diloco.lab.training import train
  from diloco.runtime.blueprint import make_blueprint

  began_s = time.monotonic()

  def tell(step: int, loss: float):
    total = config.protocol.total_steps
    print(f'step {step}/{total}  loss {loss:.4f}', file=sys.stderr)

  try:
    blueprint = make_blueprint(config)
  except (ValueError, FileNotFoundError) as error:
    flags.exit_config(ConfigError([str(error)]))
  trained = train(blueprint, tell)
  result = sweep.Result(
    loss=trained.loss,
    learners_loss=trained.points[-1].learners_loss,
    curve=tuple((p.step, p.tokens, p.loss) for p in trained.points),
    rounds=trained.rounds,
    participation=trained.participation,
    goodput=trained.goodput,
    wall_s=time.monotonic() - began_s,
    health=tuple(p.health for p in trained.points),
  )
  sweep.write_into(workdir, result)
  print(f'loss {trained.loss:.4f} nats per token')
  return 0


if __name__ == '__main__':
  flags.define_flags()
  absl_flags.mark_flag_as_required('workdir')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  flags.run(main)
