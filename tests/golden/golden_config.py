# SPDX-License-Identifier: Apache-2.0
"""The configuration of the recorded run: two learners, one kill, 16 s."""

from experiments import tests_tiny


def get_config(arg=None):
  config = tests_tiny.get_config(arg)
  config.name = 'golden'
  config.model.update(d_model=16, head_dim=8, d_ff=16)
  config.protocol.total_steps = 200
  config.faults = ('kill learner 1 at 0.33',)
  config.checkpoint.update(syncer_every_rounds=16, learner_every_steps=40)
  config.run.eval_every_rounds = 16
  config.run.log_every_steps = 4
  config.run.step_floor_s = 0.08
  return config
