# SPDX-License-Identifier: Apache-2.0
"""Loss of the global model on held-out text: python -m diloco.evaluate …

  python -m diloco.evaluate --config=experiments/NAME.py --workdir=DIR \\
    [--task=experiments/tasks/continuation.jsonl]

With --task the final model also answers the multiple-choice questions of a
task file. All of it is written to DIR/evaluation.json.
"""

import os
import pathlib
import sys

from absl import flags

from diloco import flags as config_flags
from diloco.config_values import ConfigError
from diloco.data import corpus
from diloco.data.questions import read_questions
from diloco.metrics import summary
from diloco.metrics.workdir import Workdir
from diloco.runtime import logs, scoring
from diloco.runtime.blueprint import make_blueprint
from diloco.runtime.final_parameters import check_has_logits, final_parameters
from diloco.runtime.heldout import Heldout

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_TASK = flags.DEFINE_string('task', None, 'File of questions, JSON lines.')


def main(_) -> int:
  """Evaluates the run's first and last Θ, writes `evaluation.json`."""
  config = config_flags.load()
  logs.keep_ours(config.name, **config_flags.who())
  workdir = Workdir(pathlib.Path(_WORKDIR.value))
  task = pathlib.Path(_TASK.value) if _TASK.value is not None else None
  window = config.data.seq_len
  try:
    blueprint = make_blueprint(config)
    model = blueprint.model
    if task is not None:
      check_has_logits(model, config.model.kind)
      questions = read_questions(task, config.model.vocab, window)
    final = final_parameters(blueprint, workdir)
  except (ValueError, FileNotFoundError) as error:
    config_flags.exit_config(ConfigError([str(error)]))
  task_score = None
  if task is not None:
    likelihoods = scoring.log_likelihoods(
      model, final, questions, window, config.run.eval_batch
    )
    task_score = scoring.task_score(task.name, questions, likelihoods, window)
  text, heldout = blueprint.text, Heldout(blueprint)
  initial_loss = heldout.loss(blueprint.initial_parameters())
  final_loss = heldout.loss(final)
  # A token is a byte; but the loss of a bowl is no cross-entropy.
  has_bits = model.logits is not None
  evaluation = summary.Evaluation(
    parameters=blueprint.parameters,
    initial_loss=initial_loss,
    final_loss=final_loss,
    bigram_loss=corpus.bigram_entropy(text.train, text.heldout),
    unigram_loss=corpus.unigram_entropy(text.train, text.heldout),
    initial_bits_per_byte=summary.bits(initial_loss) if has_bits else None,
    final_bits_per_byte=summary.bits(final_loss) if has_bits else None,
    task=task_score,
  )
  summary.write_evaluation(workdir.evaluation, evaluation)
  print(evaluation, file=sys.stderr)
  return 0


if __name__ == '__main__':
  config_flags.define_flags()
  config_flags.define_log_flags()
  flags.mark_flag_as_required('workdir')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  if config_flags.asks_for_json(sys.argv):
    logs.write_json('evaluate')
  config_flags.run(main)
