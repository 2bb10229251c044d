# SPDX-License-Identifier: Apache-2.0
"""Loss of the global model on held-out text: python -m diloco.evaluate …

  python -m diloco.evaluate RUN \\
    [--task=experiments/tasks/continuation.jsonl] [--config.run.eval_batches=64]

The configuration is that in RUN, unless there is a --config. With --task
the final model also answers the multiple-choice questions of a task file, or
gives the last answers of its dialogues. All of it is printed, and written to
RUN/evaluation.json.
"""

import pathlib

from absl import flags

from diloco.config import config_files
from diloco.config import flags as config_flags
from diloco.evaluation.final_evaluation import evaluated
from diloco.metrics import status
from diloco.metrics.run_progress import ProgressLine
from diloco.metrics.workdir import Workdir
from diloco.pages import text_tables
from diloco.run.command import run_command
from diloco.run.spec import make_run_spec

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_TASK = flags.DEFINE_string('task', None, 'File of questions, JSON lines.')


def main(config) -> int:
  """Evaluates the run's first and last Θ, writes `evaluation.json`."""
  workdir = Workdir(pathlib.Path(_WORKDIR.value))
  task = None
  if _TASK.value is not None:
    task = pathlib.Path(config_files.find(_TASK.value))
  with ProgressLine() as line:
    line.say('reads the model and the text')
    with config_flags.refusing():
      run_spec = make_run_spec(config)
      evaluation = evaluated(run_spec, workdir, task, line.say)
  status.write_evaluation(workdir.evaluation, evaluation)
  print(text_tables.plain(text_tables.losses(evaluation)))
  print(f'{evaluation.parameters:,} parameters')
  if evaluation.task is not None:
    print('\n'.join(status.task_lines(evaluation.task)))
  return 0


if __name__ == '__main__':
  run_command(main, role='evaluate', of_run=True)
