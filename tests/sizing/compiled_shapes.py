# SPDX-License-Identifier: Apache-2.0
"""Prints the largest arrays of a compiled step that no device should have.

Run by `test_compiled_shapes.py` in a process of its own, as a compiler for
chips that are not there is set up once. Arguments: what computes attention, and
the logits that a chunk of the loss may have. Prints a line of JSON: arrays of
[tokens, vocabulary], and of [length, length], and whether the kernel is there.
"""

import json
import math
import re
import sys

from diloco.config import hardware, run_config
from diloco.learner.programs import StepPrograms
from diloco.models import vocabulary
from diloco.run.spec import make_run_spec
from diloco.sizing import estimate
from experiments import recipe

VOCAB, LENGTH, TOPOLOGY = 262144, 8192, 'v5litepod-4'


def learner(attention: str) -> run_config.RunConfig:
  """Returns one of few layers; each chip has a sequence."""
  raw = recipe.get_config('scale=1b')
  raw.model.update(vocab=VOCAB, layers=2, attention=attention)
  raw.data.update(seq_len=LENGTH, batch=4, path='is not read')
  raw.inner.accumulate = 1
  raw.mesh.fsdp = 4
  return run_config.build(raw)


def shapes(text: str) -> set[tuple[int, ...]]:
  """Returns the shapes of all arrays of a program."""
  found = re.findall(r'\b(?:pred|[fsu]\d+|bf16)\[([\d,]+)\]', text)
  return {tuple(map(int, each.split(','))) for each in found}


def squares(found: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
  """Returns those with two axes of the length or more, but the vocabulary."""
  return sorted(
    shape
    for shape in found
    if sum(n >= LENGTH and n != VOCAB for n in shape) > 1
  )


def of_all_tokens(found: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
  """Returns those of the vocabulary for as many tokens as a chip has."""
  return sorted(
    shape
    for shape in found
    if VOCAB in shape and math.prod(shape) >= VOCAB * LENGTH
  )


if __name__ == '__main__':
  vocabulary.LOGITS_MAX = int(sys.argv[2])
  config = learner(sys.argv[1])
  slice_ = hardware.topology(TOPOLOGY)
  devices = estimate.described(slice_, 'tpu').devices
  run_spec = make_run_spec(config, reads_text=False)
  text = StepPrograms(run_spec, devices).compiled['step'].as_text()
  arrays = shapes(text)
  print(
    json.dumps(
      {
        'squares': squares(arrays),
        'of_all_tokens': of_all_tokens(arrays),
        'kernel': 'tpu_custom_call' in text,
      }
    )
  )
