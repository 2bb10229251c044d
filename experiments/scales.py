# SPDX-License-Identifier: Apache-2.0
"""One study at several sizes: what of a run changes with the model, by name.

  python -m launch.local --config=experiments/recipe.py:scale=150m \\
    --config.data.path=FOLDER --workdir=DIR

'small' is what the studies were made with, on 2 CPU cores. The others are for
accelerators: so many devices per learner as their mesh says, 20 tokens per
parameter for all learners together. A token is a byte there too: give them
text of your own, the standard library's 11 MB are too few. Text that is too
long for memory is read from files, as `c4.py` does, and in word pieces. Their
inner rates are starting points of the usual size, not tuned, and none has been
run yet.
"""

import ml_collections

from experiments import common

TOKENS_PER_PARAMETER = 20  # Hoffmann et al., 2022: about compute-optimal.
SMALL_STEPS = 2000
SMALL = 'small'
# By sequences of a learner's step, the best rate of `tuning.py` where it is not
# the usual one.
SMALL_RATES = {16: 11e-3, 32: 16e-3}
FINAL_EVAL_BATCHES = 256
# Its P, H, τ, K, M and the cap of the grace window, in steps.
PAPER = {
  'fragments': 24,
  'sync_every_steps': 24,
  'overlap_steps': 2,
  'quorum': 1,
  'learners': 8,
  'grace_cap_steps': 1.0,
}

# parameters: of the model, rounded; active: those that a token passes, where
# these are fewer, and what its budget of tokens counts; batch: sequences per
# learner and step.
SCALES = {
  SMALL: {
    'parameters': 131e3,
    'model': {
      'layers': 2, 'd_model': 64, 'heads': 4, 'kv_heads': 2, 'head_dim': 16,
      'd_ff': 192,
    },
    'data': {'seq_len': 64, 'batch': 8},
    'inner': {'lr': 8e-3, 'warmup_steps': 200},
    'mesh': {'fsdp': 1},
  },
  '150m': {
    'parameters': 150e6,
    'model': {
      'layers': 12, 'd_model': 1024, 'heads': 16, 'kv_heads': 4,
      'head_dim': 64, 'd_ff': 3200, 'dtype': 'bfloat16', 'remat': 'full',
    },
    'data': {'source': 'text', 'seq_len': 2048, 'batch': 64},
    'inner': {'lr': 1e-3, 'warmup_steps': 500, 'accumulate': 4},
    'mesh': {'fsdp': 4},
  },
  '1b': {
    'parameters': 1e9,
    'model': {
      'layers': 20, 'd_model': 2048, 'heads': 16, 'kv_heads': 4,
      'head_dim': 128, 'd_ff': 6400, 'dtype': 'bfloat16', 'remat': 'full',
    },
    'data': {'source': 'text', 'seq_len': 2048, 'batch': 256},
    'inner': {'lr': 4e-4, 'warmup_steps': 1000, 'accumulate': 8},
    'mesh': {'fsdp': 8},
  },
  '5b': {
    'parameters': 5e9,
    'model': {
      'layers': 26, 'd_model': 4096, 'heads': 32, 'kv_heads': 8,
      'head_dim': 128, 'd_ff': 12288, 'dtype': 'bfloat16', 'remat': 'full',
    },
    'data': {'source': 'text', 'seq_len': 4096, 'batch': 256},
    'inner': {'lr': 2e-4, 'warmup_steps': 2000, 'accumulate': 8},
    'mesh': {'fsdp': 32},
  },
  '12b': {
    'parameters': 12e9,
    'model': {
      'layers': 44, 'd_model': 5120, 'heads': 40, 'kv_heads': 8,
      'head_dim': 128, 'd_ff': 13824, 'dtype': 'bfloat16', 'remat': 'full',
    },
    'data': {'source': 'text', 'seq_len': 4096, 'batch': 256},
    'inner': {'lr': 1.6e-4, 'warmup_steps': 2000, 'accumulate': 2},
    'mesh': {'fsdp': 128},
  },
  'moe': {
    'parameters': 4.9e9,
    'active': 0.7e9,
    'model': {
      'kind': 'moe', 'layers': 16, 'd_model': 1536, 'heads': 12,
      'kv_heads': 4, 'head_dim': 128, 'd_ff': 2048, 'experts': 32, 'top_k': 4,
      'dtype': 'bfloat16', 'remat': 'full',
    },
    'data': {'source': 'text', 'seq_len': 2048, 'batch': 256},
    'inner': {'lr': 4e-4, 'warmup_steps': 1000, 'accumulate': 8},
    'mesh': {'fsdp': 4, 'expert': 8},
  },
}  # fmt: skip


def scaled(
  name: str, arg: str | None, sequences: int, small_steps: int = SMALL_STEPS
) -> ml_collections.ConfigDict:
  """A configuration that takes learners=, steps=, scale=, paper and quicktest.

  Args:
    name: of the run.
    arg: as `common.parse_arg` takes it.
    sequences: in one step of all learners together, at the scale 'small'.
    small_steps: inner steps at that scale, unless `arg` says how many.
  """
  args = common.parse_arg(
    arg, quicktest=False, paper=False, learners=4, steps=0, scale=SMALL
  )
  if args.paper:
    args.learners = PAPER['learners']
  config = common.base()
  config.name = name
  config.protocol.update(
    learners=args.learners, overlap_steps=1, grace_cap_steps=1.0
  )
  if args.paper:
    config.protocol.update(PAPER)
  apply(config, args.scale)
  steps = args.steps
  if args.scale == SMALL:
    rows = sequences // args.learners
    config.data.update(batch=rows, shards=args.learners)
    config.inner.lr = rate_of(rows)
    steps = steps or small_steps
  if steps:  # Else as many as the scale has.
    config.update_from_flattened_dict(steps_of(steps))
  return common.quicktest(config) if args.quicktest else config


def steps_of(number: int) -> dict[str, object]:
  """Changes: so many inner steps, a tenth of them to warm up."""
  return {'protocol.total_steps': number, 'inner.warmup_steps': number // 10}


def learners(number: int, sequences: int) -> dict[str, object]:
  """Changes: so many learners with the sequences of a step between them."""
  rows = sequences // number
  return {
    'protocol.learners': number,
    'data.batch': rows,
    'data.shards': number,
    'inner.lr': rate_of(rows),
  }


def rate_of(rows: int) -> float:
  """Returns the inner rate of a small learner with so many rows a step."""
  return SMALL_RATES.get(rows, SCALES[SMALL]['inner']['lr'])


def apply(
  config: ml_collections.ConfigDict, scale: str
) -> ml_collections.ConfigDict:
  """Gives `config`, in place, the size of that name.

  What a study is about (protocol, codecs, outer optimizer) stays; its steps
  are those of the token budget over all its learners.

  Raises:
    ValueError: there is no such scale.
  """
  if scale not in SCALES:
    raise ValueError(
      f'scale={scale!r}: must be one of {", ".join(SCALES)}; it is a size of '
      'experiments/scales.py'
    )
  for section, values in SCALES[scale].items():
    if section not in ('parameters', 'active'):
      config[section].update(values)
  config.protocol.total_steps = total_steps(scale, config.protocol.learners)
  if scale != SMALL:  # All of such a text would take longer than it is worth.
    config.lab.final_eval_batches = FINAL_EVAL_BATCHES
    # It would take the CPU beside the syncer hours.
    config.run.eval_every_rounds = 0
  return config


def on_two_cores(
  config: ml_collections.ConfigDict, scale: str, learners: int
) -> None:
  """Makes `config`, in place, a run of two minutes on two CPU cores.

  Args:
    scale: SMALL: smaller still than the scale of that name; or what `apply`
      takes, of which only the protocol and the schedule are then as here.
  """
  config.model.update(
    layers=2, d_model=128, heads=2, kv_heads=1, head_dim=64, d_ff=256
  )
  config.data.update(seq_len=128, batch=8)
  config.inner.update(lr=4e-3, schedule='cosine', warmup_steps=80)
  config.protocol.update(
    learners=learners,
    fragments=8,
    sync_every_steps=24,
    overlap_steps=6,
    quorum=1,
    total_steps=800,
  )
  config.run.cpu_threads = 2  # All processes share two cores.
  if scale != SMALL:
    apply(config, scale)
    config.run.cpu_threads = 0


def active_parameters(scale: str) -> float:
  """Returns the number of parameters that one token passes."""
  row = SCALES[scale]
  return row.get('active', row['parameters'])


def total_steps(scale: str, learners: int) -> int:
  """Inner steps of each learner."""
  if scale == SMALL:
    return SMALL_STEPS
  row = SCALES[scale]
  per_step = learners * row['data']['batch'] * row['data']['seq_len']
  return round(TOKENS_PER_PARAMETER * active_parameters(scale) / per_step)
