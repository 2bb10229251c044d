# SPDX-License-Identifier: Apache-2.0
"""A learner with a disk of its own loses its syncer before the run ends."""

import signal

import pytest

from diloco.checkpoint.store import newest_after
from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from tests.processes.processes import SLOW, START_S, Processes
from tests.survival.survival import BOWL

pytestmark = pytest.mark.beside

EXIT_CUT_OFF = 69
TOTAL_STEPS = 150
WAIT_S = 30.0  # After its last step: the patience below, of 300 s.


@pytest.fixture(scope='module')
def cut_off(tmp_path_factory):
  """The learner's process, its own folder, and all that was started."""
  root = tmp_path_factory.mktemp('cut_off')
  own = root / 'own'
  own.mkdir()
  with Processes(
    root,
    *BOWL,
    *SLOW,
    'protocol.patience=0.1',
    f'protocol.total_steps={TOTAL_STEPS}',
    'protocol.learners=1',
    'protocol.quorum=1',
    'run.log_every_steps=1',
  ) as processes:
    syncer = processes.syncer()
    learner = processes.learner(0, flags=(f'--workdir={own}',))
    processes.until_merged(0)
    syncer.send(signal.SIGKILL)
    code = processes.exit_code(learner, START_S + WAIT_S)
    yield code, learner, Workdir(own)


def test_it_leaves_with_a_code_of_its_own(cut_off):
  code, learner, _ = cut_off
  assert code == EXIT_CUT_OFF, learner.output
  assert any('cut off from the syncer' in line for line in learner.errors)


def test_it_makes_no_more_steps_than_the_run_has(cut_off):
  _, _, workdir = cut_off
  steps = read_jsonl(workdir.metrics(learner_name(0)))
  # Its view of t may be that of the last update: a spacing behind.
  assert steps[-1][names.GLOBAL_STEP] <= TOTAL_STEPS + 10


def test_its_last_state_is_on_its_disk(cut_off):
  _, _, workdir = cut_off
  steps = read_jsonl(workdir.metrics(learner_name(0)))
  saved = newest_after(workdir.checkpoints(learner_name(0)), 0)
  assert saved.step == steps[-1]['step']
