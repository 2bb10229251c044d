# SPDX-License-Identifier: Apache-2.0
"""Evaluates Θ periodically while a run goes on: python -m diloco.evaluator …

  python -m diloco.evaluator RUN

Every `run.eval_every_rounds` rounds it takes the syncer's newest checkpoint and
writes validation loss and bits per byte to metrics/evaluator.jsonl and to
TensorBoard. It needs only the folder, and no other process depends on it; the
configuration is that in RUN, unless there is a --config. It uses one thread of
the CPU, at low priority. Exit code 0: the run is over.
"""

import os
import pathlib

import jax
from absl import flags

from diloco.config import flags as config_flags
from diloco.config import run_config
from diloco.evaluation.continuous import ContinuousEvaluator
from diloco.metrics.workdir import EVALUATOR, Workdir
from diloco.metrics.writer import JsonlWriter, MultiWriter, TensorBoardWriter
from diloco.monitoring import monitor_flags
from diloco.run.command import run_command
from diloco.run.environment import THREADS
from diloco.run.spec import make_run_spec

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
NICE = 10  # Learners on the same cores go first; 19 gets no turn at all.


def main(config) -> int:
  """Follows the run to its end."""
  jax.config.update('jax_platforms', 'cpu')  # Devices are the learners'.
  os.nice(NICE)
  workdir = Workdir(pathlib.Path(_WORKDIR.value))
  with config_flags.refusing():
    monitor = monitor_flags.begin(config.name, EVALUATOR)
    run_spec = make_run_spec(config)
  writer = MultiWriter(
    [
      JsonlWriter(workdir.metrics(EVALUATOR)),
      TensorBoardWriter(
        workdir.tensorboard(EVALUATOR), run_config.flat(config)
      ),
      monitor,
    ]
  )
  try:
    ContinuousEvaluator(run_spec, workdir, EVALUATOR, writer).run()
  finally:
    writer.close()
  return 0


if __name__ == '__main__':
  os.environ[THREADS] = '1'  # Before jax looks for devices.
  run_command(main, role='evaluator', of_run=True)
