# SPDX-License-Identifier: Apache-2.0
"""The heavy packages that a process imports until it can begin.

A learner or syncer that comes back imports all of them before its first round,
at a tenth of a second of CPU or more each.
"""

import pytest

from tests.commands import output

HEAVY = ('flax', 'grain', 'grpc', 'jax', 'matplotlib', 'optax', 'orbax')
SERVES = {'grpc', 'jax', 'optax'}  # Optax: the outer optimizer is one of its.
NO_DEVICES = (  # For machines without any, or simulations.
  'diloco.report.__main__', 'diloco.simulate', 'diloco.swarm', 'diloco.tape',
  'diloco.watch.__main__', 'diloco.write_records', 'launch.chaos.__main__',
  'launch.local',
)  # fmt: skip
MAY = {
  **{module: set() for module in NO_DEVICES},
  # --help, and flags or keys that are refused, wait for none of them.
  'diloco.learner.__main__': set(),
  'diloco.syncer.__main__': set(),
  'diloco.syncer_shard': set(),
  # Imported by these three once their flags are read.
  'diloco.syncer.server': SERVES,
  'diloco.syncer.shard_server': SERVES,
  # Grain makes the batches, and imports Orbax.
  'diloco.learner.hosts.host_main': {*SERVES, 'grain', 'orbax'},
}
FOUND = f"""
import sys
print(*(name for name in {HEAVY!r} if name in sys.modules))
"""
SERVER = """
import pathlib, sys
from diloco.bench import real_run
from diloco.config import run_config
from diloco.metrics.workdir import Workdir
from diloco.run.spec import make_run_spec
from diloco.syncer.server import SyncerServer
from diloco.transport.planes import make_plane

config = real_run.get_config()
with config.unlocked():
  config.update_from_flattened_dict(real_run.bowl(0.01))
run_spec = make_run_spec(run_config.build(config))
plane = make_plane('grpc', '127.0.0.1')
workdir = Workdir(pathlib.Path(sys.argv[1]))
server = SyncerServer(run_spec, '127.0.0.1:0', plane, workdir)
server.close()
plane.close()
"""


def _heavy(code: str, *arguments: str) -> set[str]:
  """Returns the heavy packages that a process has after `code`."""
  return set(output('-c', code + FOUND, *arguments).split())


@pytest.mark.parametrize('module', MAY)
def test_a_process_imports_what_is_listed_and_no_more(module):
  assert _heavy(f'import {module}') == MAY[module]


def test_a_syncer_without_a_checkpoint_begins_without_orbax(tmp_path):
  """Neither does it need Flax for a model that is not made of it."""
  assert _heavy(SERVER, str(tmp_path)) == SERVES
