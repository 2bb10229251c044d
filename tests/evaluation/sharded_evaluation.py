# SPDX-License-Identifier: Apache-2.0
"""Evaluates a model on one and on eight devices; prints both, as JSON.

Run by `test_sharded_evaluation.py` in a process of its own, which has them.
Argument: the kind of the model.
"""

import json
import sys

import jax
import numpy as np

from diloco.config import run_config
from diloco.data.tasks import Question
from diloco.data.tokenizers import BYTES
from diloco.evaluation import final_evaluation, sampling
from diloco.run import on_devices
from diloco.run.heldout import Heldout
from diloco.run.spec import make_run_spec
from experiments import tests_tiny

CHANGES = {
  'decoder': {'mesh.tensor': 2, 'model.kv_heads': 2},
  'moe': {
    'mesh.tensor': 2,
    'mesh.expert': 2,
    'model.experts': 4,
    'model.kv_heads': 2,
  },
}
QUESTIONS = [Question('def ', ('main', 'x = 3', 'é', 'ab', 'cd'), 0)]
PROMPTS = [b'class ', b'x', *[b'def main'] * 6]


def evaluate(run_spec, params, devices) -> dict:
  """Returns losses, likelihoods, text, and the share of the first device."""
  placed = on_devices.of_run(run_spec, devices)
  language, window = run_spec.model.language, run_spec.config.data.seq_len
  rows = final_evaluation.choice_rows(QUESTIONS, BYTES, window, 256)
  sampler = sampling.Sampler(language, placed, params, window, 0.0, 0)
  arrays = placed.place(params).values()
  here = sum(x.addressable_shards[0].data.nbytes for x in arrays)
  return {
    'loss': Heldout(run_spec, devices=devices).loss(params),
    'likelihoods': final_evaluation.log_likelihoods(
      language, placed, params, rows, 8
    ),
    'text': list(sampler.sample([list(x) for x in PROMPTS], 40, seed=0)),
    'share': here / sum(x.nbytes for x in arrays),
    'mesh': dict(placed.mesh.shape),
  }


if __name__ == '__main__':
  config = tests_tiny.get_config()
  config.model.kind = sys.argv[1]
  config.run.eval_batch = 8
  config.update_from_flattened_dict(CHANGES[sys.argv[1]])
  run = make_run_spec(run_config.build(config))
  rng = np.random.default_rng(0)
  theta = {
    path: rng.standard_normal(spec.shape, np.float32) / 8
    for path, spec in run.specs.items()
  }
  results = [evaluate(run, theta, jax.devices()[:n]) for n in (1, 8)]
  print(json.dumps(results))
