# SPDX-License-Identifier: Apache-2.0
"""`run.step_floor_s`: steps take at least so long, and it is no stall."""

import pytest

from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from tests.in_process.in_process import LEARNERS, Run
from tests.transport.faulty import Faults

pytestmark = pytest.mark.alone

FLOOR_S = 0.02
CLOCK_S = 0.001  # Two readings of the clock around one sleep.


def test_a_step_takes_at_least_its_floor_and_does_not_stall_for_it(tmp_path):
  run = Run(tmp_path, Faults(), step_floor_s=FLOOR_S, total_steps=40)
  run.finish()
  files = [run.workdir.metrics(f'learner-{m}') for m in range(LEARNERS)]
  steps = max(map(read_jsonl, files), key=len)  # One may make nearly all.
  assert len(steps) > 20
  assert min(s[names.STEP_TIME] for s in steps) >= FLOOR_S - CLOCK_S
  stalls_s = sorted(s[names.STALL_TIME] for s in steps)
  assert stalls_s[len(steps) // 2] < 0.9 * FLOOR_S
  assert min(s['train/grad_norm'] for s in steps) > 0
