# SPDX-License-Identifier: Apache-2.0
"""Does a small model learn from dialogues to do what it is asked?

Copy digits, sort them, add two numbers: in bytes, from nothing, two learners
and a syncer as processes of one machine. A seventh of all questions is held
out, and never trained on; the score is the share of these that the final model
answers right, token for token.

Commands:
  python -m experiments.dialogues runs/dialogues.jsonl runs/asked.jsonl
  python -m launch.local --config=experiments/dialogues.py \\
    --workdir=runs/dialogues --config.data.path=runs/dialogues.jsonl
  python -m diloco.evaluate runs/dialogues --task=runs/asked.jsonl
Hardware: 2 CPU cores. Wall time: 348 s of training beside much other work, one
learner killed at 40 %; of 150 held-out questions of each kind all were right,
one seed. 2,000 steps, 228 s: copy 93 %, sort 98 %, add 88 %.
Variants: dialogues.py:learners=4.
"""

import json
import pathlib
import random
import sys
import zlib

from experiments import common

KINDS = ('copy', 'sort', 'add')
DIGITS = 3, 5  # At least and at most, of what is copied or sorted.
TERMS = 20  # Of a sum, both are below.
HELDOUT = 7  # One question of so many.
TRAINED, ASKED = 30_000, 300  # Dialogues that the command writes.


def dialogue(kind: str, rng: random.Random) -> tuple[str, str]:
  """Returns a question of one of `KINDS`, and its answer."""
  if kind == 'add':
    a, b = rng.randrange(TERMS), rng.randrange(TERMS)
    return f'add {a} {b}', str(a + b)
  digits = ''.join(rng.choices('0123456789', k=rng.randint(*DIGITS)))
  return f'{kind} {digits}', ''.join(
    sorted(digits) if kind == 'sort' else digits
  )


def is_heldout(question: str) -> bool:
  """Returns True for questions that are never trained on, by their text."""
  return zlib.crc32(question.encode()) % HELDOUT == 0


def write(
  path: str | pathlib.Path,
  count: int,
  seed: int,
  heldout: bool = False,
  kinds: tuple[str, ...] = KINDS,
) -> None:
  """Writes dialogues as JSON lines, of all kinds alike.

  Args:
    heldout: whether their questions are those that are never trained on.
  """
  rng = random.Random(seed)
  with pathlib.Path(path).open('w') as file:
    written = 0
    while written < count:
      question, answer = dialogue(kinds[written % len(kinds)], rng)
      if is_heldout(question) != heldout:
        continue
      turns = ('user', question), ('assistant', answer)
      messages = [{'role': role, 'content': text} for role, text in turns]
      file.write(json.dumps({'messages': messages}) + '\n')
      written += 1


@common.experiment('dialogues', learners=2, steps=2600)
def get_config(config, args):
  config.model.update(
    layers=2, d_model=64, heads=4, kv_heads=4, head_dim=16, d_ff=192
  )
  config.data.update(
    source='jsonl',
    path='runs/dialogues.jsonl',
    text_key='chat:messages',
    seq_len=64,
    batch=16,
    shards=max(4, args.learners),
  )
  config.inner.update(lr=6e-3, schedule='cosine', warmup_steps=100)
  config.protocol.update(
    learners=args.learners,
    fragments=4,
    sync_every_steps=24,
    overlap_steps=2,
    quorum=1,
    total_steps=args.steps,
  )
  config.checkpoint.learner_every_steps = 100
  config.run.cpu_threads = 2  # All processes share two cores.


if __name__ == '__main__':
  trained, asked = sys.argv[1:]
  write(trained, TRAINED, seed=0)
  write(asked, ASKED, seed=1, heldout=True)
