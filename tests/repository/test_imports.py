# SPDX-License-Identifier: Apache-2.0
"""Imports go one way: the table of docs/design.md, held."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
STDLIB = sys.stdlib_module_names

# What a package may import besides itself and, but for protocol, the standard
# library. The longest prefix that names a file decides.
PROTOCOL_STDLIB = {
  'collections',
  'dataclasses',
  'enum',
  'itertools',
  'json',
  'math',
  'typing',
}
CONFIG = {
  'diloco.config',
  'diloco.config_data',
  'diloco.config_faults',
  'diloco.config_lab',
  'diloco.config_limits',
  'diloco.config_reading',
  'diloco.config_values',
  'diloco.flags',
}
SIMULATED = {'diloco.simulation_config', *CONFIG}
LOW = {
  'diloco.protocol',
  'diloco.numerics',
  'diloco.models',
  'diloco.data',
  'diloco.metrics',
  'diloco.transport',
  'diloco.checkpoint',
}
TABLE = {
  'diloco/protocol': set(),
  'diloco/numerics': {'jax', 'numpy', 'optax'},
  'diloco/models': {'jax', 'flax', 'numpy'},
  'diloco/data': {'grain', 'numpy'},
  # Readers of files and tokenizers; but for those that Grain brings along, they
  # are extras, imported where they are needed.
  'diloco/data/paths.py': {'diloco.data', 'etils'},
  'diloco/data/token_index.py': {'diloco.data', 'etils', 'numpy'},
  'diloco/data/records_folder.py': {
    'array_record',
    'diloco.data',
    'etils',
    'numpy',
  },
  'diloco/data/parquet_files.py': {'diloco.data', 'pyarrow'},
  'diloco/data/tfds_files.py': {'diloco.data', 'tensorflow_datasets'},
  'diloco/data/tokenizer_kinds.py': {
    'diloco.data',
    'sentencepiece',
    'tiktoken',
    'tokenizers',
  },
  'diloco/metrics': {'numpy', 'absl', 'tensorboardX', 'diloco.protocol'},
  'diloco/transport': {'diloco.protocol', 'grpc', 'msgpack', 'numpy'},
  'diloco/transport/jax_transfer.py': {
    'diloco.protocol',
    'diloco.transport',
    'jax',
    'numpy',
  },
  'diloco/checkpoint': {
    'orbax',
    'jax',
    'grain',
    'numpy',
    'diloco.metrics.files',
    'diloco.protocol',
    'diloco.transport.interface',
  },
  'diloco/checkpoint/safetensors_files.py': {'numpy', 'safetensors'},
  'diloco/sim': {'diloco.protocol', 'diloco.metrics', 'numpy'},
  'diloco/swarm.py': {'diloco.sim', 'absl'},
  'diloco/pages': {'matplotlib', 'numpy', 'rich', 'diloco.metrics'},
  'diloco/studies': {
    'diloco.host_memory',
    'diloco.metrics',
    'diloco.pages.parts',
    'diloco.protocol',
    'diloco.sim',
    'numpy',
    *SIMULATED,
  },
  'diloco/reports': {
    'diloco.lab.sweep',  # No more of the lab: that needs jax.
    'diloco.metrics',
    'diloco.pages.parts',
    'diloco.pages.words',
    'diloco.studies',
    'numpy',
  },
  'diloco/report.py': CONFIG | {'diloco.pages', 'diloco.reports', 'absl'},
  'diloco/simulation_config.py': CONFIG | {'diloco.protocol'},
  'diloco/simulate.py': {
    'diloco.pages',
    'diloco.sim',
    'diloco.studies',
    'absl',
    *SIMULATED,
  },
  'diloco/plan.py': {
    'diloco.pages',
    'diloco.sim',
    'diloco.sizing',  # In its second mode only: it needs jax.
    'diloco.slice_flags',
    'diloco.studies',
    'absl',
    *SIMULATED,
  },
  'diloco/lab': LOW
  | CONFIG
  | {
    'diloco.runtime',
    'diloco.sim',
    'absl',
    'jax',
    'numpy',
    'rich',  # The bar.
    'experiments.common',  # Of the benchmark.
  },
  'diloco/runtime': LOW
  | CONFIG
  | {'absl', 'diloco.topologies', 'jax', 'numpy', 'optax'},
  'diloco/config.py': CONFIG | {'diloco.protocol'},
  'diloco/config_faults.py': {'diloco.config_values'},
  'diloco/config_data.py': {'diloco.config_values'},
  'diloco/config_lab.py': {'diloco.config_values'},
  'diloco/config_limits.py': set(),
  'diloco/config_reading.py': {'diloco.config_values'},
  'diloco/config_values.py': CONFIG | {'diloco.protocol'},
  'diloco/learner_environment.py': {'diloco.config_values'},
  'diloco/host_memory.py': set(),
  'diloco/sizing': LOW
  | CONFIG
  | {
    'absl',
    'diloco.host_memory',
    'diloco.learner_environment',
    'diloco.runtime',
    'diloco.slice_flags',
    'diloco.topologies',
    'jax',
    'numpy',
  },
  'diloco/slice_flags.py': {'absl'},
  'diloco/topologies.py': {'diloco.config_values'},
  'diloco/flags.py': CONFIG | {'absl', 'ml_collections'},
  'diloco': LOW | CONFIG | {'diloco.runtime', 'absl', 'jax', 'numpy'},
  'experiments': {
    'ml_collections',
    'experiments.common',
    'experiments.scales',
    'experiments.simulated',  # Its twin for simulations.
  },
  'experiments/own_model.py': {  # Its model; the others only name theirs.
    'diloco.models.interface',
    'experiments.common',
    'jax',
  },
  'launch': CONFIG
  | {
    'absl',
    'ml_collections',
    'rich',
    'matplotlib',
    'psutil',
    'diloco.learner_environment',
    'diloco.metrics',
    'diloco.protocol',
    'diloco.topologies',
  },
  'launch/manifest_text.py': {'yaml'},
}


def _files():
  for top in ('diloco', 'experiments', 'launch'):
    yield from sorted((ROOT / top).rglob('*.py'))


def _imported(path: pathlib.Path):
  """Full names of the modules that a file imports, wherever it does so."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: a relative import'
      for alias in node.names:
        whole = f'{node.module}.{alias.name}'
        is_module = (ROOT / whole.replace('.', '/')).with_suffix('.py').exists()
        is_package = (ROOT / whole.replace('.', '/')).is_dir()
        yield whole if is_module or is_package else node.module


def _row(relative: str) -> str:
  fitting = [
    row for row in TABLE if relative == row or relative.startswith(row + '/')
  ]
  return max(fitting, key=len)


def _may(relative: str, module: str) -> bool:
  row = _row(relative)
  top = module.partition('.')[0]
  if top in STDLIB or module == '__future__':
    return row != 'diloco/protocol' or top in PROTOCOL_STDLIB
  itself = row.removesuffix('.py').replace('/', '.')
  allowed = {*TABLE[row], 'diloco' if row == 'diloco' else itself}
  if row == 'diloco' and module.startswith(('diloco.sim', 'diloco.studies')):
    return False
  return any(module == a or module.startswith(a + '.') for a in allowed)


@pytest.mark.parametrize(
  'path', [p.relative_to(ROOT).as_posix() for p in _files()]
)
def test_imports_of(path):
  wrong = [m for m in _imported(ROOT / path) if not _may(path, m)]
  assert not wrong, f'{path} may not import {wrong}; row {_row(path)!r}'


def test_the_table_refuses():
  assert not _may('diloco/protocol/pace.py', 'time')
  assert not _may('diloco/numerics/merge.py', 'flax')
  assert not _may('diloco/runtime/link.py', 'diloco.sim.engine')
  assert not _may('launch/local.py', 'jax')
  assert not _may('diloco/transport/grpc_plane.py', 'jax')


def test_every_row_names_something():
  for row in TABLE:
    assert (ROOT / row).exists(), row
