# SPDX-License-Identifier: Apache-2.0
"""Loss of the global model on held-out text: python -m diloco.evaluate …

  python -m diloco.evaluate RUN \\
    [--task=experiments/tasks/continuation.jsonl] [--config.run.eval_batches=64]

The configuration is that in RUN, unless there is a --config. With --task
the final model also answers the multiple-choice questions of a task file. All
of it is printed, and written to RUN/evaluation.json.
"""

import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from absl import flags

from diloco.config import config_files
from diloco.config import flags as config_flags
from diloco.config.run_config import RunConfig
from diloco.data import corpus, text_windows
from diloco.data.corpus import check_is_of_bytes
from diloco.data.tasks import read_questions
from diloco.evaluation import multiple_choice
from diloco.evaluation.final_parameters import (
  check_has_logits,
  final_parameters,
)
from diloco.metrics import status
from diloco.metrics.run_progress import ProgressLine, counted
from diloco.metrics.workdir import Workdir
from diloco.pages import text_tables
from diloco.run.command import run_command
from diloco.run.heldout import Heldout
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
    evaluation = _evaluated(config, workdir, task, line.say)
  status.write_evaluation(workdir.evaluation, evaluation)
  print(text_tables.plain(text_tables.losses(evaluation)))
  print(f'{evaluation.parameters:,} parameters')
  if evaluation.task is not None:
    print('\n'.join(status.task_lines(evaluation.task)))
  return 0


def _evaluated(
  config: RunConfig,
  workdir: Workdir,
  task: pathlib.Path | None,
  say: Callable[[str], None],
) -> status.Evaluation:
  """Evaluates the first and the last Θ of a run."""

  def each(what: str) -> Callable[[Sequence], Iterable]:
    return lambda parts: counted(parts, say, lambda _: what)

  say('reads the model and the text')
  window = config.data.seq_len
  with config_flags.refusing():
    run_spec = make_run_spec(config)
    model = run_spec.model
    if task is not None:
      check_has_logits(model, config.model.kind)
      check_is_of_bytes(run_spec.text, f'--task={task}')
      questions = read_questions(task, config.model.vocab, window)
    final = final_parameters(run_spec, workdir)
  task_score = None
  if task is not None:
    likelihoods = multiple_choice.log_likelihoods(
      model,
      final,
      questions,
      window,
      config.run.eval_batch,
      each('batches of choices'),
    )
    task_score = multiple_choice.task_score(
      task.name, questions, likelihoods, window
    )
  heldout = Heldout(run_spec)
  first = run_spec.initial_parameters()
  initial_loss = heldout.loss(first, each('batches, of the first Θ'))
  final_loss = heldout.loss(final, each('batches, of the last Θ'))
  say('counts pairs of tokens')
  bigram_loss, unigram_loss = _entropies(run_spec.text)
  bytes_per_token = text_windows.bytes_per_token(run_spec.text.heldout)

  def bits(loss: float) -> float | None:
    """Per byte; the loss of a bowl is no cross-entropy."""
    return status.bits(loss) / bytes_per_token if model.logits else None

  return status.Evaluation(
    parameters=run_spec.parameters,
    initial_loss=initial_loss,
    final_loss=final_loss,
    bigram_loss=bigram_loss,
    unigram_loss=unigram_loss,
    initial_bits_per_byte=bits(initial_loss),
    final_bits_per_byte=bits(final_loss),
    task=task_score,
    bytes_per_token=bytes_per_token,
  )


def _entropies(text: corpus.Corpus) -> tuple[float | None, float | None]:
  """Returns the bigram and unigram entropies of a text in memory."""
  if not isinstance(text.train, np.ndarray):
    return None, None
  return (
    corpus.bigram_entropy(text.train, text.heldout),
    corpus.unigram_entropy(text.train, text.heldout),
  )


if __name__ == '__main__':
  run_command(main, role='evaluate', of_run=True)
