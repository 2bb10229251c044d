# SPDX-License-Identifier: Apache-2.0
"""Checks what Weights & Biases gets of a run, without a network."""

import json

import pytest

from diloco.config.sections import ConfigError
from diloco.metrics import names, status
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import JsonlWriter
from diloco.report import to_wandb
from tests.watch.test_followed_run import told


def test_a_folder_without_metrics_is_refused(tmp_path):
  with pytest.raises(ConfigError, match='holds no metrics of a run'):
    to_wandb.main(['to_wandb', str(tmp_path)])


def test_each_process_becomes_a_run_in_a_file(tmp_path, monkeypatch, capsys):
  pytest.importorskip('wandb')
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv(to_wandb.MODE, raising=False)
  workdir = Workdir(tmp_path / 'book')
  for learner in range(2):
    path = workdir.metrics(learner_name(learner))
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = JsonlWriter(path)
    for step in (1, 2):
      scalars = {names.TIME: 9.0, names.GLOBAL_STEP: 70 + step}
      writer.write_scalars(step, scalars | {names.TRAIN_LOSS: 2.5})
    writer.close()
  status.write_status(workdir.status, told(10, 5.0))
  workdir.config.write_text(json.dumps({'outer': {'lr': 0.625}}))
  assert to_wandb.main(['to_wandb', str(workdir.root)]) == 0
  said = 'learner-0: 2 records\nlearner-1: 2 records\n'
  said += 'syncer: the figures of the run\n'
  assert capsys.readouterr().out == said
  files = sorted(tmp_path.glob('wandb/offline-run-*/*.wandb'))
  assert len(files) == 3
  of_syncer = [path for path in files if b'goodput' in path.read_bytes()]
  assert len(of_syncer) == 1
  for path in set(files) - set(of_syncer):
    for text in (b'train/loss', b'run/global_step', b'0.625', b'book'):
      assert text in path.read_bytes(), text
