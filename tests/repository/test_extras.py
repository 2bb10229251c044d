# SPDX-License-Identifier: Apache-2.0
"""The plain installation is enough for the processes of a run."""

import subprocess
import sys

import pytest

from tests.repository.tree import ROOT

# Import names of what only extras of setup.py install.
EXTRAS = (
  'google.cloud',
  'kubernetes_validate',
  'matplotlib',
  'nbclient',
  'psutil',
  'pyarrow',
  'safetensors',
  'sentencepiece',
  'tensorflow_datasets',
  'tiktoken',
  'tokenizers',
  'wandb',
)
BLOCKED = f"""
import importlib, sys

class Missing:
  def find_spec(self, name, path=None, target=None):
    if name in {EXTRAS!r}:
      raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)

sys.meta_path.insert(0, Missing())
importlib.import_module(sys.argv[1])
"""
MODULES = (
  'diloco.bench.__main__',
  'diloco.learner.__main__',
  'diloco.syncer.__main__',
  'diloco.syncer_shard',
  'diloco.evaluator',
  'diloco.lab.__main__',
  'diloco.replay.__main__',
  'diloco.report.__main__',
  'diloco.report.to_wandb',
  'diloco.evaluate',
  'diloco.export',
  'diloco.generate',
  'diloco.plan',
  'diloco.simulate',
  'diloco.swarm',
  'diloco.tape',
  'diloco.watch.__main__',
  'diloco.__main__',
  'diloco.write_records',
  'launch.chaos.__main__',
  'launch.local',
  'launch.main',
)


@pytest.mark.parametrize('module', MODULES)
def test_a_command_starts_without_the_extras(module):
  done = subprocess.run(
    [sys.executable, '-c', BLOCKED, module],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]


def test_a_module_that_needs_one_fails():
  """The check itself sees what is missing."""
  done = subprocess.run(
    [sys.executable, '-c', BLOCKED, 'diloco.checkpoint.safetensors_files'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert "No module named 'safetensors'" in done.stderr
