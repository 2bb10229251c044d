# SPDX-License-Identifier: Apache-2.0
"""More learners than a syncer's limits were once made for."""

import pytest

from diloco.config import run_config
from diloco.protocol import messages
from diloco.transport import wire
from tests.syncer.spoken import Stage, small_run_spec

pytestmark = pytest.mark.beside

MANY = 80


def test_eighty_learners_are_served(tmp_path):
  """The real server refused the 65th once, whatever the config said."""
  stage = Stage(small_run_spec(learners=MANY), tmp_path)
  stage.start()
  try:
    peers = [stage.peer(learner).join() for learner in range(MANY)]
    peers[-1].train(stage.run_spec.config.protocol.spacing_steps)
    peers[-1].offer(1, 1e-3)
    for peer in peers:
      assert peer.hear(messages.Update).participants == (MANY - 1,)
    assert stage.syncing._control.ended() == {}
  finally:
    stage.close()


def test_the_message_of_a_round_fits_where_a_learner_is_let_in():
  learners, shards = 1000, 8
  hosts = run_config.limits_of(learners, learners, shards).hosts
  parts = (messages.Part((1 << 40), 1 << 31),) * (hosts * shards)
  large = 1 << 61
  update = messages.Update(
    round=large,
    fragment=large,
    version=large,
    step=large,
    reported_step=large,
    participants=(large,) * learners,
    weights=(0.5,) * learners,
    incarnations=(large,) * learners,
    handles=(large,) * learners,
    ages_steps=(0.5,) * learners,
    payload=messages.Payload(large, 'int4', large, large, parts),
    crc=large,
    part_crcs=(1 << 31,) * len(parts),
  )
  assert len(wire.encode(update)) > wire.MESSAGE_BYTES_MAX // 2
  assert run_config.MESSAGE_BYTES_MAX == wire.MESSAGE_BYTES_MAX
