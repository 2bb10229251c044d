# SPDX-License-Identifier: Apache-2.0
"""Loss of the global model on held-out text: python -m diloco.evaluate …"""

import os
import pathlib
import sys

from absl import flags

from diloco import flags as config_flags
from diloco.checkpoint.parameters import read_parameters
from diloco.config_values import ConfigError
from diloco.data import corpus
from diloco.metrics.summary import Evaluation, write_evaluation
from diloco.metrics.workdir import Workdir
from diloco.runtime import logs
from diloco.runtime.blueprint import make_blueprint
from diloco.runtime.heldout import Heldout

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')


def main(_) -> int:
  """Evaluates the run's first and last Θ, writes `evaluation.json`."""
  config = config_flags.load()
  logs.keep_ours()
  workdir = Workdir(pathlib.Path(_WORKDIR.value))
  try:
    blueprint = make_blueprint(config)
    final = read_parameters(workdir.parameters)
  except (ValueError, FileNotFoundError) as error:
    config_flags.exit_config(ConfigError([str(error)]))
  text, heldout = blueprint.text, Heldout(blueprint)
  evaluation = Evaluation(
    parameters=blueprint.parameters,
    initial_loss=heldout.loss(blueprint.initial_parameters()),
    final_loss=heldout.loss(final),
    bigram_loss=corpus.bigram_entropy(text.train, text.heldout),
    unigram_loss=corpus.unigram_entropy(text.train, text.heldout),
  )
  write_evaluation(workdir.evaluation, evaluation)
  print(evaluation, file=sys.stderr)
  return 0


if __name__ == '__main__':
  config_flags.define_flags()
  flags.mark_flag_as_required('workdir')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  config_flags.run(main)
