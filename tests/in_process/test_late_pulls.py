# SPDX-License-Identifier: Apache-2.0
"""The log of a learner that joins does not begin with warnings."""

import numpy as np
import pytest
from absl import logging

from diloco.config import run_config
from diloco.learner.replica import Mismatch, VersionGap, whole_replica
from diloco.learner.transfers import logged_reason
from diloco.numerics import payload
from diloco.run.spec import make_run_spec
from diloco.transport.data_plane import NotOffered, PeerLost
from experiments import tests_tiny


@pytest.mark.parametrize(
  ('error', 'kind', 'level'),
  [
    (VersionGap('version 0 is here, …'), 'Mismatch', 'INFO'),
    (NotOffered('Buffer id: 0 out of range 0'), 'NotOffered', 'INFO'),
    (Mismatch('CRC 0 of fragment 1, announced 2'), 'Mismatch', 'WARNING'),
    (PeerLost('gone'), 'PeerLost', 'WARNING'),
  ],
)
def test_what_a_newcomer_is_late_for_is_no_warning(
  error, kind, level, monkeypatch, caplog
):
  monkeypatch.setattr(logging.get_absl_logger(), 'propagate', True)
  caplog.set_level('INFO', 'absl')
  assert logged_reason('donor 1', error) == f'{kind}: {error}'
  (record,) = caplog.records
  assert record.levelname == level
  assert record.getMessage() == f'donor 1: {kind}: {error}'


def test_an_update_needs_its_base_and_gives_the_announced_bytes():
  config = run_config.build(tests_tiny.get_config())
  run_spec = make_run_spec(config, reads_text=False)
  zeros = [
    {name: np.zeros(like.shape, like.dtype) for name, like in each.items()}
    for each in run_spec.fragments_like()
  ]
  copy = whole_replica(run_spec, zeros)
  with pytest.raises(VersionGap, match='version 0 is here, the update needs 6'):
    copy.update(0, 7, (), crc=0)
  # One of the next version is taken if it gives the bytes of the syncer.
  pieces = run_spec.layout.fragments[0]
  sent, crc = payload.encode(zeros[0], pieces, run_spec.down), copy.crcs()[0]
  with pytest.raises(Mismatch, match='CRC'):
    copy.update(0, 1, (sent,), crc + 1)
  assert copy.held()[0].version == 0
  copy.update(0, 1, (sent,), crc)
  assert copy.held()[0].version == 1
