# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts, spread over devices, whose learner is killed.

Its moments are stored in bfloat16, and come back so.
"""

import signal

import pytest

from diloco.metrics import token_ledger
from diloco.metrics.jsonl import read_jsonl
from tests.processes.processes import ENDLESS, SLOW, START_S, Processes

pytestmark = pytest.mark.beside

EXPERTS = (
  'model.kind=moe', 'model.experts=4', 'model.top_k=2', 'mesh.expert=2',
  'protocol.learners=2', 'protocol.quorum=1',
  'checkpoint.learner_every_steps=8', 'inner.moments=bfloat16',
)  # fmt: skip


def test_a_killed_learner_comes_back_with_its_experts(tmp_path):
  devices = {'JAX_NUM_CPU_DEVICES': '2'}
  with Processes(tmp_path, *EXPERTS, *ENDLESS, *SLOW) as processes:
    syncer = processes.syncer()
    learners = [processes.learner(m, environment=devices) for m in (0, 1)]
    for m in (0, 1):
      processes.until_merged(m)
    learners[1].send(signal.SIGKILL)
    assert processes.exit_code(learners[1]) == -signal.SIGKILL
    died = len(processes.steps(1))
    processes.until_merged(0)  # The other one needs nobody.
    again = processes.learner(1, name='learner-1-again', environment=devices)
    processes.until(
      lambda: len(processes.steps(1)) > died, START_S, 'it makes steps again'
    )
    processes.until_merged(1)
    for running in (learners[0], again, syncer):
      running.send(signal.SIGTERM)
    for running in (learners[0], again, syncer):
      processes.exit_code(running)
    lines = read_jsonl(processes.workdir.learner_tape(1))
    begins = [line for line in lines if line['kind'] == 'Begin']
    assert [line['machine']['expert'] for line in begins] == [2, 2]
    first, second = begins
    assert second['rows'] > first['rows']  # It did not begin anew.
    losses = [step['train/loss'] for step in processes.steps(1)]
    assert max(losses[-5:]) < losses[0], losses
    fragments = 1 + max(x['fragment'] for x in processes.tape('Publish'))
    rows = token_ledger.rows_of(processes.workdir, fragments)
    assert all(row.unexplained == 0 for row in rows.values()), rows
