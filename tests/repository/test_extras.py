# SPDX-License-Identifier: Apache-2.0
"""The plain installation is enough for the processes of a run."""

from tests.commands import python

# Import names of what only extras of setup.py install.
EXTRAS = (
  'google.cloud',
  'jinja2',
  'kubernetes_validate',
  'matplotlib',
  'nbclient',
  'psutil',
  'pyarrow',
  'safetensors',
  'sentencepiece',
  'tokenizers',
  'wandb',
  'zstandard',
)
BLOCKED = f"""
import importlib, os, sys

class Missing:
  def find_spec(self, name, path=None, target=None):
    if name in {EXTRAS!r}:
      raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)

sys.meta_path.insert(0, Missing())
import diloco.learner.hosts.host_main  # What most of them import.
for module in sys.argv[1:]:
  child = os.fork()  # Each defines its flags.
  if not child:
    importlib.import_module(module)
    os._exit(0)
  if os.waitpid(child, 0)[1]:
    sys.exit(f'{{module}} does not start')
"""
MODULES = (
  'diloco.bench.__main__',
  'diloco.learner.__main__',
  'diloco.learner.hosts.host_main',
  'diloco.syncer.__main__',
  'diloco.syncer.server',
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


def _failure(*modules: str) -> str:
  """Returns why a process that imports them without the extras fails."""
  done = python('-c', BLOCKED, *modules)
  return done.stderr if done.returncode else ''


def test_commands_start_without_the_extras():
  assert not _failure(*MODULES)


def test_a_module_that_needs_one_fails():
  failure = _failure('diloco.checkpoint.safetensors_files')
  assert "No module named 'safetensors'" in failure
