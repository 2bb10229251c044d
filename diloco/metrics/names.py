# SPDX-License-Identifier: Apache-2.0
"""Names of the scalars that several programs write and read.

A scalar's step is the learner's own inner step, 1 after the first of a
process; `GLOBAL_STEP` beside it is t, as the learner last heard it.
"""

TIME = 'time_s'  # Seconds since the epoch, so that processes compare.
INCARNATION = 'incarnation'  # Of the learner that writes.
GLOBAL_STEP = 'global_step'
TRAIN_LOSS = 'train/loss'  # Nats per token, of one batch.
# Of a model with experts, beside the loss; see `diloco/models/routing.py`.
ROUTING = {
  name: f'train/{name}'
  for name in ('aux_loss', 'z_loss', 'expert_entropy', 'expert_load_max')
}
LEARNING_RATE = 'train/learning_rate'
STEP_TIME = 'perf/step_s'
STALL_TIME = 'perf/stall_s'  # Of step_s, waiting for the exchange.
TOKENS_PER_S = 'perf/tokens_per_s'
MFU = 'perf/mfu'  # Share of the chips' peak, where that is known.
SOCKET_SENT = 'perf/socket_sent_bytes'  # TCP payload since the start, all
SOCKET_RECEIVED = 'perf/socket_received_bytes'  # of it; on Linux only.
EVAL_LOSS = 'eval/loss'  # Nats per token, held-out text.
EVAL_BITS = 'eval/bits_per_byte'  # The same in bits, of language models.
MERGED_TOKENS = 'eval/merged_tokens'  # In the Θ that was evaluated.
EVAL_TIME = 'perf/eval_s'  # Of one evaluation.
