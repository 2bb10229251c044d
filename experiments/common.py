# SPDX-License-Identifier: Apache-2.0
"""Every configuration key with its default, in the one place for defaults."""

import ml_collections

SECTIONS = {
  'model': {
    'kind': 'decoder',  # Or 'moe', 'bowl', a 'module:function' of yours.
    'vocab': 256,  # One token per byte.
    'layers': 4,  # Decoder blocks.
    'd_model': 128,  # Width of the residual stream.
    'heads': 4,  # Query heads.
    'kv_heads': 2,  # Key and value heads; divides heads.
    'head_dim': 32,  # Width of one head; even, for RoPE.
    'd_ff': 384,  # Width of the gated MLP; of each expert, where kind='moe'.
    'rope_theta': 10_000.0,  # Base of RoPE's wavelengths.
    'dtype': 'float32',  # Of activations; parameters stay float32.
    'remat': 'none',  # What the backward pass recomputes.
    'tied': False,  # Whether the output head is the embedding.
    'experts': 8,  # Of each layer; this and all below of kind 'moe' only.
    'top_k': 2,  # Experts that one token is sent to.
    'aux_weight': 0.01,  # Of the load-balancing loss.
    'z_weight': 1e-5,  # Of the router's z-loss.
    'router_bias_rate': 0.0,  # What a step moves the bias by; 0: no bias.
  },
  'data': {
    'source': 'stdlib',  # Or 'grammar', 'text'; 'array_record', 'parquet',
    # 'tfds': files of documents; 'mix' of these. Bytes, but for files.
    'path': '',  # File, folder or pattern; of 'tfds' DIR or DIR#SPLIT.
    'text_key': 'text',  # Column or feature with a document's text.
    'tokenizer': 'bytes',  # Or 'sentencepiece:FILE', 'tokenizers:FILE',
    # 'tiktoken:FILE'.
    'end_token': '',  # Behind each document; '': the tokenizer's own.
    'mix': (),  # Of 'mix': ('0.7 parquet PATH', '0.3 array_record PATH').
    'heldout_path': '',  # Held-out files; '': the end of each file.
    'heldout_percent': 1.0,  # Of documents, where there is no such path.
    'index_path': '',  # Folder of indices of files; '': ~/.cache/diloco.
    'threads': 1,  # Of a learner that read ahead.
    'seq_len': 128,  # Tokens in one sequence.
    'batch': 8,  # Sequences per learner and inner step.
    'shards': 16,  # Logical shards, fixed for the run; at least M.
    'grammar_bytes': 1 << 20,  # Length of the text of source 'grammar'.
  },
  'inner': {
    'optimizer': 'adamw',  # 'adamw' or 'sgd'.
    'lr': 3e-3,  # Peak learning rate.
    'schedule': 'cosine',  # 'constant', 'cosine' or 'wsd'.
    'warmup_steps': 20,  # Linear warm-up, in steps of `progress`.
    'final_fraction': 0.1,  # Last learning rate, as a share of lr.
    'progress': 'global',  # The schedule follows t, or its 'own' steps.
    'b1': 0.9,  # Decay of AdamW's first moment.
    'b2': 0.95,  # Decay of AdamW's second moment.
    'eps': 1e-8,  # Added to AdamW's denominator.
    'weight_decay': 0.1,  # Decoupled, of AdamW.
    'clip_norm': 1.0,  # Global gradient norm; 0 does not clip.
    'accumulate': 1,  # Parts of a batch, one after another on the devices.
  },
  'outer': {
    'lr': 0.6,  # Of the outer step.
    'momentum': 0.7,  # Of the outer step.
    'nesterov': True,  # Nesterov's form of the momentum.
    'anneal_fraction': 0.1,  # Of the run, at its end: momentum goes to 0,
    'final_lr': 0.8,  # and lr to this one.
  },
  'fragments': {
    'scheme': 'balanced',  # 'balanced', 'tensor' or 'layer'.
    'embedding': 'split',  # By rows over all fragments, or its 'own'.
  },
  'codec': {
    'up': 'int4',  # Of a learner's delta to its base.
    'down': 'int4',  # Of the syncer's outer update.
    'block_size': 128,  # Values that share one scale.
    'scale': 'bf16',  # 'bf16' or 'f32'.
    'error_feedback': True,  # The syncer keeps its rounding residual.
  },
  'merge': {
    'rule': 'rda',  # 'rda' or 'mean', for all but embeddings.
    'embedding': 'mean',  # 'mean' or 'rda', for embedding and output head.
  },
  'protocol': {
    'learners': 2,  # M.
    'fragments': 8,  # P; divides H.
    'sync_every_steps': 24,  # H, between two syncs of one fragment.
    'overlap_steps': 6,  # τ, inner steps that an exchange may overlap.
    'quorum': 1,  # K, offers without which no round closes; 0: all, K = M.
    'grace_safety': 0.8,  # γ, the share of the slack that grace uses.
    'grace_cap_steps': 2.0,  # The longest grace window, in inner steps.
    'admission': 'latest',  # 'latest' or 'fresh'.
    'max_staleness_versions': 4,  # Offers on an older base are refused.
    'weighting': 'tokens',  # Of what is merged: 'tokens' or 'equal'.
    'patience': 1.0,  # Stretches all time-outs; they are measured.
    'total_steps': 500,  # The run ends at this global step.
    'blend': 'carry',  # 'overwrite', 'mix' or 'carry'.
    'blend_alpha': 0.0,  # α of 'mix': the weight of what is overwritten.
  },
  'syncer': {
    'shards': 1,  # S, the processes that share Θ; one of them leads.
  },
  'mesh': {
    'fsdp': 1,  # Devices of one learner over which parameters are sharded.
    'expert': 1,  # Devices over which the experts are spread.
    'tensor': 1,  # Devices over which heads and d_ff are split.
  },
  'transport': {
    'data_plane': 'jax_transfer',  # 'jax_transfer' or 'grpc'.
    'host': '127.0.0.1',  # Where the syncer listens.
    'port': 0,  # 0: any free one.
    'connect_s': 60.0,  # How long a learner looks for the syncer.
  },
  'checkpoint': {
    'keep_latest': 2,  # Newest checkpoints of a process that stay.
    'keep_best': 0,  # Those of the lowest loss that stay besides.
    'syncer_every_rounds': 16,  # Between two of the syncer's.
    'learner_every_steps': 200,  # Between two of a learner's; 0: none.
    # A close is on disk before any learner is told: it survives a loss of
    # power, not only the end of the process.
    'fsync': True,
  },
  'run': {
    'log_every_steps': 10,  # Between two records of a learner's metrics.
    'eval_every_rounds': 0,  # Θ is evaluated beside the run; 0: at its end.
    'eval_batches': 16,  # Held-out batches of one evaluation.
    'eval_batch': 16,  # Sequences in one of them.
    'restarts_max': 10,  # Of one process; then the run stops.
    'restart_delay_s': 1.0,  # Between a death and the restart.
    'cpu_threads': 0,  # NPROC of each process; 0 leaves it as it is.
    'compilation_cache': True,  # One for all processes, in the workdir.
    'step_floor_s': 0.0,  # An inner step takes at least this long: it sleeps.
  },
  'lab': {
    'system': 'decoupled',  # Or 'data_parallel', 'elastic', 'alone'.
    'step_s': 1.0,  # Simulated, as all times here.
    'slow_learners': 0,  # How many are slower than the others.
    'slow_gap': 0.18,  # The share of steps that a slow one lacks.
    'jitter': 0.05,  # Standard deviation of a step's length.
    'latency_s': 0.01,  # Of a message, one way.
    'transfer_s': 0.1,  # Of a fragment.
    'mtbf_steps': 0.0,  # Mean time between deaths of a learner; 0: none.
    'away_steps': 20.0,  # For how long a dead learner is away.
    'pause_steps': 2.0,  # Data-parallel stands when its group changes.
    'visitors': 0,  # The last so many learners are there for a while only.
    'visit_from': 0.0,  # Share of total_steps at which they start,
    'visit_until': 1.0,  # and at which they are told to go.
    'eval_every_steps': 0,  # Between evaluations; 0: at the end only.
    'final_eval_batches': 0,  # At the end; 0: all of the held-out text.
    'checkpoint_steps': 500,  # Between checkpoints; 0: none.
  },
}


def base() -> ml_collections.ConfigDict:
  """A valid run of two learners; experiments change what they are about.

  `diloco/config/sections.py` holds the type and the rules of every key.
  """
  config = ml_collections.ConfigDict()
  config.name = 'base'  # Of the run; learners of another run are refused.
  config.seed = 0  # Of the initial parameters and of the data order.
  config.update(SECTIONS)
  config.faults = ()  # Such as 'kill learner 1 at 0.33' (of total_steps).
  return config


def quicktest(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Shrinks `config`, in place, to about 20 CPU seconds; keeps its character.

  Codecs, merge rules, faults and admission stay as they are.
  """
  config.name += '-quicktest'
  config.model.update(
    layers=2, d_model=32, heads=2, kv_heads=1, head_dim=16, d_ff=64
  )
  config.data.update(
    source='grammar',
    path='',
    mix=(),
    heldout_path='',
    tokenizer='bytes',
    end_token='',
    seq_len=32,
    batch=4,
    grammar_bytes=1 << 16,
  )
  config.inner.update(warmup_steps=4, accumulate=1)
  protocol = config.protocol
  protocol.update(
    learners=min(protocol.learners, 2),
    quorum=min(protocol.quorum, 2),
    fragments=min(protocol.fragments, 2),
    sync_every_steps=4,
    overlap_steps=min(protocol.overlap_steps, 2),
    total_steps=40,
  )
  config.mesh.update(fsdp=1, expert=1, tensor=1)
  config.checkpoint.update(syncer_every_rounds=8, learner_every_steps=10)
  config.run.update(log_every_steps=1, eval_batches=2, eval_batch=4)
  config.lab.final_eval_batches = 2
  if config.run.eval_every_rounds:
    config.run.eval_every_rounds = 8
  return config


def parse_arg(arg: str | None, **defaults) -> ml_collections.ConfigDict:
  """Reads what stands behind the colon of --config=experiments/x.py:ARG.

  Args:
    arg: such as 'quicktest,learners=4': a name alone means True.
    **defaults: the names allowed, with their defaults; the type of a default
      (bool, int, float or str) is the type of its value.

  Returns:
    The names with their values, locked.

  Raises:
    ValueError: a name is unknown or a value is not of its default's type.
  """
  values = dict(defaults)
  for item in filter(None, (arg or '').split(',')):
    name, equals, text = item.partition('=')
    if name not in defaults:
      raise ValueError(
        f'unknown argument {name!r} of the config, it takes '
        f'{", ".join(sorted(defaults)) or "none"}'
      )
    values[name] = _typed(name, text if equals else 'true', defaults[name])
  return ml_collections.ConfigDict(values).lock()


def _typed(name: str, text: str, default):
  kind = type(default)
  truths = {'true': True, 'false': False}
  try:
    return truths[text.lower()] if kind is bool else kind(text)
  except (KeyError, ValueError):
    raise ValueError(
      f'argument {name}={text!r} of the config must be of type {kind.__name__}'
    ) from None
