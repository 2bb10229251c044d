# SPDX-License-Identifier: Apache-2.0
"""Draws text from the final model of a run: python -m diloco.generate …

  python -m diloco.generate RUN \\
    [--prompt='def '] [--length=200] [--temperature=0.8] [--top_k=40] [--seed=0]

Prints the prompt and what follows; several --prompt are continued at once. The
same seed gives the same text. The configuration is that in RUN, unless there is
a --config. The model is spread over the devices of this machine.
"""

import os
import pathlib

from absl import flags

from diloco.config import flags as config_flags
from diloco.data.tokenizers import BYTES
from diloco.evaluation import sampling
from diloco.evaluation.final_evaluation import (
  checked_language,
  final_parameters,
)
from diloco.metrics.run_progress import ProgressLine, counted
from diloco.metrics.workdir import Workdir
from diloco.run import on_devices
from diloco.run.command import run_command
from diloco.run.spec import make_run_spec

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_PROMPT = flags.DEFINE_multi_string('prompt', '\n', 'Text to go on from.')
_LENGTH = flags.DEFINE_integer('length', 200, 'Tokens to draw.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
  'temperature', 0.8, 'Below 1 prefers likely tokens; 0 takes the likeliest.'
)
_TOP_K = flags.DEFINE_integer(
  'top_k', 40, 'Draws from the k likeliest tokens; 0: from all.', lower_bound=0
)
_SEED = flags.DEFINE_integer(
  'seed', 0, 'Seed of the draws.', lower_bound=0, upper_bound=2**32 - 1
)


def main(config) -> int:
  """Prints; 78 where the model or the prompt will not do."""
  # What the shell gave, to the byte, even where it is no UTF-8.
  prompts = list(map(os.fsencode, _PROMPT.value))
  with ProgressLine() as line, config_flags.refusing():
    line.say('reads the model')
    if config.data.tokenizer == BYTES.name:
      for prompt in prompts:
        sampling.check_prompt(prompt, config.model.vocab)
    run_spec = make_run_spec(config, reads_weights=False)
    tokenizer = run_spec.text.tokenizer
    # They go on: without an end.
    begun = [each[:-1].tolist() for each in tokenizer.encode(prompts)]
    if not all(begun):
      raise ValueError('prompt: is empty, there is nothing to go on from')
    language = checked_language(run_spec.model, config.model.kind)
    params = final_parameters(run_spec, Workdir(pathlib.Path(_WORKDIR.value)))
    sampler = sampling.Sampler(
      language,
      on_devices.of_run(run_spec),
      params,
      config.data.seq_len,
      _TEMPERATURE.value,
      _TOP_K.value,
      tokenizer.vocab,
    )
    tokens = sampler.sample(begun, _LENGTH.value, _SEED.value)
    through = counted(range(_LENGTH.value), line.say, lambda _: 'tokens')
    drawn = zip(*(next(tokens) for _ in through))
    texts = [tokenizer.decode([*x, *y]) for x, y in zip(begun, drawn)]
  print('\n\n'.join(text.decode(errors='replace') for text in texts))
  return 0


if __name__ == '__main__':
  run_command(main, of_run=True)
