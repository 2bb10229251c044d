# SPDX-License-Identifier: Apache-2.0
"""From dialogues two learners learn to do what they are asked.

One of them dies of SIGKILL on the way. The questions that the final model is
asked are none of those that it was trained on.
"""

import pytest

from diloco.metrics import status
from diloco.metrics.workdir import Workdir
from experiments import dialogues
from tests.commands import output
from tests.repository.tree import ROOT

SOLVED = 0.9
QUESTIONS = 150


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_copying_and_sorting_are_learned_with_a_killed_learner(tmp_path):
  lines, root = tmp_path / 'dialogues.jsonl', tmp_path / 'run'
  dialogues.write(lines, dialogues.TRAINED, seed=0)
  said = output(
    *('-m', 'launch.local', f'--config={ROOT}/experiments/dialogues.py'),
    f'--workdir={root}',
    f'--config.data.path={lines}',
    f'--config.data.index_path={tmp_path / "index"}',
    "--config.faults=('kill learner 1 at 0.4',)",
    timeout=3000.0,
  )
  summary = status.read_summary(Workdir(root).summary)
  assert [each.incarnations for each in summary.learners] == [1, 2], said
  for kind in ('copy', 'sort'):
    task = tmp_path / f'{kind}.jsonl'
    dialogues.write(task, QUESTIONS, seed=1, heldout=True, kinds=(kind,))
    output('-m', 'diloco.evaluate', root, f'--task={task}')
    found = status.read_evaluation(Workdir(root).evaluation)
    assert found.task.exact.share >= SOLVED, (kind, found.task)
