# SPDX-License-Identifier: Apache-2.0
"""Makes a task file from a run's held-out text: python -m diloco.make_task …

  python -m diloco.make_task --config=experiments/quickstart.py \\
    --outfile=FILE.jsonl [--questions=256] [--choices=4] \\
    [--context_bytes=112] [--choice_bytes=16] [--seed=0]

Each question shows some bytes; the choices are the true continuation and bytes
from elsewhere in the text. The same text gives the same file. `python -m
diloco.evaluate --task=FILE.jsonl` scores a model on it.
"""

import pathlib
import sys

import numpy as np
from absl import flags

from diloco.config import flags as config_flags
from diloco.data.tasks import continuation_questions, write_questions
from diloco.metrics.run_progress import ProgressLine
from diloco.run.command import run_command
from diloco.run.spec import load_text

_OUTFILE = flags.DEFINE_string('outfile', None, 'File to write.')
_QUESTIONS = flags.DEFINE_integer('questions', 256, 'Questions to make.')
_CHOICES = flags.DEFINE_integer(
  'choices', 4, 'Answers to choose from in a question.'
)
_CONTEXT = flags.DEFINE_integer(
  'context_bytes', 112, 'Bytes of text before a choice.'
)
_CHOICE = flags.DEFINE_integer('choice_bytes', 16, 'Bytes of text of a choice.')
_SEED = flags.DEFINE_integer(
  'seed', 0, 'Seed of all draws.', lower_bound=0, upper_bound=2**32 - 1
)


def main(config) -> int:
  """Writes the file; 78 where the text does not suffice."""
  outfile = pathlib.Path(_OUTFILE.value)
  with ProgressLine() as line, config_flags.refusing():
    line.say('reads the text')
    if not outfile.parent.is_dir():
      raise ValueError(f'--outfile={outfile}: there is no such folder')
    text = load_text(config)
    if not isinstance(text.heldout, np.ndarray):
      raise ValueError(
        f'data.source={config.data.source!r}: questions are made of a text in '
        "memory, such as data.source='text'"
      )
    line.say('looks for places to ask about')
    questions = continuation_questions(
      text.heldout,
      _QUESTIONS.value,
      _CHOICES.value,
      _CONTEXT.value,
      _CHOICE.value,
      _SEED.value,
    )
  write_questions(outfile, questions)
  print(f'{len(questions)} questions of {text.name}', file=sys.stderr)
  return 0


if __name__ == '__main__':
  run_command(main, required=['outfile'])
