# SPDX-License-Identifier: Apache-2.0
"""Names of the scalars that several programs write and read; those of the whole
run are in `figures`.

A scalar's step is the learner's own inner step, 1 after the first of a process;
the accompanying `GLOBAL_STEP` is t, as the learner last knew it.
"""

TIME = 'time_s'  # Seconds since the epoch, comparable across processes.
INCARNATION = 'incarnation'  # Incarnation of the learner that writes.
GLOBAL_STEP = 'global_step'
TRAIN_LOSS = 'train/loss'  # Nats per token, of one batch.
# Metrics of an inner step besides its loss, where the model has them: the norm
# of the gradient before it is clipped, and those of `diloco/models/routing.py`.
OF_STEP = {
  name: f'train/{name}'
  for name in (
    'grad_norm',
    'aux_loss',
    'z_loss',
    'expert_entropy',
    'expert_load_max',
  )
}
TOKENS = 'train/tokens'  # Own ones so far, as in the event log.
LEARNING_RATE = 'train/learning_rate'
STEP_TIME = 'perf/step_s'
STALL_TIME = 'perf/stall_s'  # Part of step_s spent waiting for the exchange.
TOKENS_PER_S = 'perf/tokens_per_s'
MFU = 'perf/mfu'  # Share of the chips' peak, if known.
SOCKET_SENT = 'perf/socket_sent_bytes'  # TCP payload since the start, all
SOCKET_RECEIVED = 'perf/socket_received_bytes'  # of it; on Linux only.
EVAL_LOSS = 'eval/loss'  # Nats per token, held-out text.
EVAL_BITS = 'eval/bits_per_byte'  # `EVAL_LOSS` in bits, for language models.
MERGED_TOKENS = 'eval/merged_tokens'  # In the Θ that was evaluated.
EVAL_TIME = 'perf/eval_s'  # Duration of one evaluation.
# Of a shard beside the syncer.
SHARD_ROUND = 'shard/closed_round'  # The last round that it has taken in.
SHARD_LED = 'shard/has_lead'  # 1 while it is connected to its leader, else 0.
# `GLOBAL_STEP` on a board, which sorts cards by their names: not the first.
BOARD_STEP = 'run/global_step'
