# SPDX-License-Identifier: Apache-2.0
"""Imports go one way: the table of docs/design.md, held."""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
STDLIB = sys.stdlib_module_names

# What a package may import besides itself and, but for protocol, the standard
# library. The longest prefix that names a file decides. A name in capitals
# stands for what its own row has.
TABLE_TEXT = """
CHOICES: diloco.data.sources diloco.data.tokenizers diloco.models.decoder_config
  diloco.models.kinds diloco.numerics.codec diloco.numerics.fragments
  diloco.numerics.merge diloco.numerics.optimizers diloco.numerics.schedule
  diloco.transport.planes
CONFIG: diloco.config.config_files diloco.config.data_section
  diloco.config.flags diloco.config.lab_section diloco.config.own_code
  diloco.config.pretrained
  diloco.config.run_config diloco.config.sections diloco.config.unlike
SIMULATED: CONFIG diloco.config.simulation
PLANNED: diloco.config.hardware diloco.config.sections diloco.fleets.pauses
  diloco.fleets.systems diloco.numerics.codec diloco.protocol
  diloco.sizing.memory
LOW: diloco.checkpoint diloco.data diloco.metrics diloco.models
  diloco.monitoring diloco.numerics diloco.protocol diloco.transport
SIMULATOR: diloco.fleets diloco.simulator
diloco/protocol: bisect collections dataclasses enum functools heapq itertools
  json math typing
diloco/numerics: jax numpy optax
diloco/models: flax jax numpy
diloco/data: grain numpy
# Readers of files and tokenizers; but for those that Grain brings along, they
# are extras, imported where they are needed.
diloco/data/paths.py: diloco.data etils
diloco/data/documents.py: diloco.data etils numpy
diloco/data/records_folder.py: array_record diloco.data etils numpy
diloco/data/array_records.py: diloco.data google.protobuf grain
diloco/data/parquet_files.py: diloco.data pyarrow
diloco/data/arrow_folders.py: diloco.data pyarrow
diloco/data/json_lines.py: diloco.data etils numpy zstandard
diloco/data/chat_templates.py: diloco.data jinja2
diloco/data/tokenizers.py: diloco.data numpy sentencepiece tokenizers
diloco/metrics: absl diloco.protocol numpy tensorboardX
diloco/metrics/workdir.py: etils fsspec
diloco/transport: diloco.protocol grpc msgpack numpy
diloco/monitoring: absl diloco.metrics diloco.transport.sockets
  prometheus_client
diloco/transport/data_plane.py: diloco.numerics.native diloco.protocol
  diloco.transport.sockets numpy
diloco/transport/jax_transfer.py: diloco.protocol diloco.transport jax numpy
diloco/checkpoint: diloco.metrics.files diloco.numerics.boxes
  diloco.numerics.native diloco.protocol
  diloco.transport.data_plane grain jax numpy orbax
diloco/checkpoint/parameters.py: diloco.checkpoint.orbax_files numpy orbax
diloco/checkpoint/safetensors_files.py: numpy safetensors
# Registries of choices, which import nothing heavy.
diloco/config: CHOICES diloco.protocol
diloco/config/pretrained.py: diloco.config diloco.models.hf_format
  diloco.models.kinds
diloco/config/lab_section.py: diloco.config diloco.faults diloco.lab.lab_systems
diloco/config/simulation.py: diloco.config diloco.fleets.failures
  diloco.fleets.pauses diloco.fleets.systems diloco.protocol
diloco/config/__main__.py: CHOICES SIMULATED absl diloco.fleets.failures
  diloco.fleets.systems diloco.protocol
diloco/config/config_files.py: SIMULATED absl ml_collections
diloco/config/flags.py: SIMULATED absl ml_collections
diloco/faults.py:
diloco/simulator: diloco.faults diloco.metrics diloco.protocol numpy
diloco/fleets: diloco.metrics diloco.protocol diloco.simulator numpy
diloco/pages: diloco.metrics matplotlib numpy rich
diloco/studies: SIMULATED SIMULATOR diloco.metrics diloco.numerics.codec
  diloco.pages.parts diloco.protocol
diloco/prediction: CONFIG SIMULATOR diloco.faults diloco.metrics
  diloco.pages.parts diloco.protocol
diloco/report/to_wandb.py: CONFIG diloco.metrics wandb
diloco/report/__main__.py: CONFIG absl diloco.metrics diloco.pages diloco.watch
# Of the lab and of the launcher: no jax.
diloco/sweeps: CONFIG absl diloco.metrics diloco.pages.text_tables scipy
diloco/watch: diloco.metrics diloco.monitoring diloco.pages diloco.sweeps.sweep
  numpy
diloco/watch/__main__.py: CONFIG absl diloco.metrics diloco.pages
  diloco.transport.sockets diloco.watch
diloco/swarm.py: CONFIG absl diloco.metrics diloco.simulator
diloco/simulate.py: SIMULATED SIMULATOR absl diloco.callables diloco.library
  diloco.metrics diloco.pages
diloco/plan.py: SIMULATED absl diloco.callables diloco.data.sources
  diloco.library diloco.metrics.run_progress diloco.sizing
# The library: what commands and notebooks call. It stands on all but processes.
diloco/__init__.py: diloco.learner.own_loop diloco.library
  diloco.numerics.trees diloco.protocol
  diloco.simulator
diloco/library: CONFIG LOW SIMULATED SIMULATOR diloco.lab diloco.pages
  diloco.prediction diloco.replay.timeline diloco.run.event_log diloco.sizing
  diloco.studies diloco.watch numpy
diloco/callables.py:
# Commands that call it.
diloco/lab/__main__.py: CONFIG absl diloco.lab diloco.library diloco.run
  diloco.sweeps
# A process knows what processes share, not the other process.
diloco/run: CONFIG LOW absl diloco.config.hardware jax numpy
diloco/learner: CONFIG LOW absl diloco.run jax numpy
diloco/learner/__main__.py: CONFIG LOW absl diloco.learner diloco.run
diloco/learner/hosts/host_main.py: CONFIG LOW absl diloco.config.hardware
  diloco.learner diloco.run jax
diloco/syncer: CONFIG LOW absl diloco.run jax numpy optax
# It writes the checkpoints of both.
diloco/begin.py: CONFIG LOW absl diloco.learner diloco.run diloco.syncer jax
  numpy optax
diloco/evaluation: CONFIG LOW absl diloco.run jax numpy
diloco/replay: CONFIG LOW absl diloco.learner diloco.run diloco.syncer jax numpy
diloco/lab: CONFIG LOW SIMULATOR absl diloco.callables diloco.learner
  diloco.pages.text_tables diloco.run diloco.sweeps diloco.syncer jax numpy
# It measures all of the others, and starts processes as users do.
diloco/bench: CONFIG LOW SIMULATOR absl diloco.learner diloco.pages diloco.run
  diloco.syncer jax ml_collections numpy rich
diloco/sizing: CONFIG LOW absl diloco.config.hardware diloco.learner diloco.run
  jax numpy
# Arithmetic, and its text: no jax.
diloco/sizing/planner.py: PLANNED
diloco/sizing/rounds.py: CONFIG SIMULATOR diloco.config.hardware diloco.metrics
  diloco.models.flops diloco.models.kinds diloco.numerics.codec diloco.sizing
# Launchers ask it, too: no jax.
diloco/sizing/memory.py: CONFIG diloco.models.kinds diloco.numerics.codec
  diloco.numerics.fragments diloco.numerics.optimizers
  diloco.numerics.shard_assignment diloco.protocol.config
diloco: CONFIG LOW absl diloco.pages.text_tables diloco.run jax numpy
experiments: diloco.config.run_config diloco.config.simulation
  experiments.common experiments.scales ml_collections
experiments/own_model.py: diloco.models.api experiments.common jax
experiments/own_loop.py: diloco jax numpy optax
experiments/tried.py: diloco.sweeps
experiments/scaling.py: experiments numpy scipy
experiments/four_bits.py: numpy
experiments/wall_clock.py: diloco.config.simulation diloco.fleets diloco.pages
  diloco.studies.bandwidth experiments
experiments/churn.py: diloco.fleets.failures experiments
experiments/fragmentation.py: diloco.sizing.memory diloco.sweeps experiments
LAUNCH: CONFIG absl diloco.config.hardware diloco.metrics
  diloco.monitoring.monitor_flags diloco.pages.figures diloco.pages.text_tables
  diloco.protocol diloco.run.bind_policy diloco.run.initial_weights
  diloco.sizing.memory diloco.sweeps
  diloco.transport.planes diloco.transport.sockets diloco.watch ml_collections
  rich yaml
launch: LAUNCH
# Across machines; their channel is that of a learner's hosts.
launch/agent.py: LAUNCH diloco.run.command diloco.transport.host_channel launch
launch/rendezvous.py: LAUNCH diloco.run.command diloco.transport.auth
  diloco.transport.host_channel launch
# They look at the data, and make a tokenizer of it, before a run.
launch/train.py: LAUNCH diloco.data launch
launch/epochs.py: LAUNCH diloco.data
# It judges runs as the simulator would, and simulates their plans.
launch/chaos: CONFIG absl diloco.config.data_section diloco.config.simulation
  diloco.faults diloco.fleets.failures
  diloco.metrics diloco.pages.text_tables diloco.prediction
  diloco.transport.sockets launch numpy rich
"""


def _parsed(text: str) -> dict[str, frozenset[str]]:
  """Returns the rows of a table, names in capitals replaced by theirs."""
  rows: dict[str, frozenset[str]] = {}
  for line in re.sub(r'#.*\n', '', text).replace('\n  ', ' ').split('\n'):
    name, _, words = line.partition(':')
    if name:
      rows[name] = frozenset().union(
        *(rows[word] if word.isupper() else {word} for word in words.split())
      )
  return {name: words for name, words in rows.items() if not name.isupper()}


NEVER_JAX = (
  'diloco.fleets',
  'diloco.simulator',
  'diloco.prediction',
  'diloco.studies',
)
TABLE = _parsed(TABLE_TEXT)


def _files():
  for top in ('diloco', 'experiments', 'launch'):
    yield from sorted((ROOT / top).rglob('*.py'))


def _imported(path: pathlib.Path, guarded: bool = True):
  """Full names of the modules that a file imports, wherever it does so.

  Args:
    guarded: behind `if __name__ == '__main__'`, too.
  """
  tree = ast.parse(path.read_text())
  if not guarded:
    tree.body = [
      node
      for node in tree.body
      if not (isinstance(node, ast.If) and '__main__' in ast.dump(node.test))
    ]
  for node in ast.walk(tree):
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
  is_common = top in STDLIB or module == 'diloco'  # Its version.
  if is_common and row != 'diloco/protocol':
    return True
  itself = row.removesuffix('.py').replace('/', '.')
  allowed = {*TABLE[row], 'diloco' if row == 'diloco' else itself}
  if row == 'diloco' and module.startswith(NEVER_JAX):
    return False
  return any(module == a or module.startswith(a + '.') for a in allowed)


def test_every_file_imports_what_its_row_allows():
  paths = [path.relative_to(ROOT).as_posix() for path in _files()]
  assert not [
    f'{path} may not import {module}; row {_row(path)!r}'
    for path in paths
    for module in _imported(ROOT / path)
    if not _may(path, module)
  ]


def test_the_table_refuses():
  assert not _may('diloco/protocol/pace.py', 'time')
  assert not _may('diloco/numerics/merge.py', 'flax')
  assert not _may('diloco/learner/connection.py', 'diloco.simulator.engine')
  assert not _may('launch/local.py', 'jax')
  assert not _may('diloco/sweeps/making.py', 'diloco.lab.run')
  assert not _may('diloco/transport/grpc_transfer.py', 'jax')
  assert not _may('diloco/learner/programs.py', 'diloco.syncer.server')
  assert not _may('diloco/syncer/server.py', 'diloco.learner.programs')
  assert not _may('diloco/run/spec.py', 'diloco.learner.programs')


def _command_or_package(module: str) -> str:
  """Returns the node of a module in the graph of packages.

  A `__main__` is a command: it may import what imports its package, for no
  other does so. Files next to the packages are nodes by themselves.
  """
  if module.endswith('.__main__'):
    return module
  return '.'.join(module.split('.')[:2])


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
  """Returns every shortest way from a package back to itself."""
  found = []
  for start in sorted(graph):
    ways, seen = [[start]], set()
    while ways:
      way = ways.pop(0)
      if way[-1] in seen:
        continue
      seen.add(way[-1])
      if start in graph.get(way[-1], ()):
        found.append([*way, start])
        break
      ways += [[*way, each] for each in sorted(graph.get(way[-1], ()))]
  return found


def _packages(added: tuple[str, str] = ('', '')) -> dict[str, set[str]]:
  """The graph of packages, lazy imports included.

  Args:
    added: an import, of a module and of what it imports.
  """
  edges = [added] if added[0] else []
  for path in _files():
    name = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    name = name.removesuffix('.__init__')
    edges += [(name, other) for other in _imported(path, guarded=False)]
  graph: dict[str, set[str]] = {}
  for name, other in edges:
    mine, theirs = _command_or_package(name), _command_or_package(other)
    is_ours = other.startswith(('diloco.', 'launch.', 'experiments.'))
    is_own_command = theirs == f'{mine}.__main__'
    if is_ours and mine != theirs and not is_own_command:
      graph.setdefault(mine, set()).add(theirs)
  return graph


def test_no_circle_ties_packages():
  assert not _circles(_packages())


def test_a_planted_circle_is_found():
  planted = _packages(('diloco.config.lab_section', 'diloco.lab.run'))
  circles = _circles(planted)
  assert ['diloco.config', 'diloco.lab', 'diloco.config'] in circles


def test_every_row_names_something():
  for row in TABLE:
    assert (ROOT / row).exists(), row
