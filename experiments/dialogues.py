# SPDX-License-Identifier: Apache-2.0
"""Does a tiny model learn to do what it is told, from dialogues alone?

Copying, reversing nothing: TBD
"""

import json
import pathlib
import random

from experiments import common

KINDS = ('copy', 'sort', 'add')


def made(kind: str, rng: random.Random) -> tuple[str, str]:
  """Returns what a user says, and the answer."""
  if kind == 'add':
    a, b = rng.randrange(100), rng.randrange(100)
    return f'add {a} {b}', str(a + b)
  digits = ''.join(rng.choices('0123456789', k=rng.randint(3, 6)))
  return f'{kind} {digits}', digits if kind == 'copy' else ''.join(sorted(digits))


def write(path, count: int, seed: int, avoid=None):
  rng = random.Random(seed)
  lines = []
  while len(lines) < count:
    asked, answer = made(KINDS[len(lines) % 3], rng)
    lines.append(json.dumps({'messages': [{'role': 'user', 'content': asked}, {'role': 'assistant', 'content': answer}]}))
  pathlib.Path(path).write_text('\n'.join(lines) + '\n')


@common.experiment('dialogues', learners=2)
def get_config(config, args):
  config.model.update(
    layers=4, d_model=64, heads=4, kv_heads=4, head_dim=16, d_ff=192
  )
  config.data.update(
    source='jsonl', path='runs/dialogues.jsonl', text_key='chat:messages', seq_len=128, batch=16, shards=4
  )
  config.inner.update(lr=4e-3, schedule='cosine', warmup_steps=100)
  config.protocol.update(
    learners=args.learners,
    fragments=4,
    sync_every_steps=24,
    overlap_steps=2,
    quorum=1,
    total_steps=1000,
  )
  config.run.cpu_threads = 2
