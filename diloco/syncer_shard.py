# SPDX-License-Identifier: Apache-2.0
"""A shard beside the syncer's leader: python -m diloco.syncer_shard --shard=1 …

The leader is `diloco.syncer`. Exit codes are its own: 0, the run is over; 78,
it can't run as configured; 143, it was stopped.
"""

import pathlib
import signal
import sys

from absl import flags, logging

from diloco.config import flags as config_flags
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import Workdir, folder_at, shard_name
from diloco.run.command import run_command

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_SHARD = flags.DEFINE_integer('shard', None, 'Its number, from 1.')
_LEADER = flags.DEFINE_string('leader', None, 'host:port of the leader.')
flags.DEFINE_alias('lead', 'leader')  # Its name before 0.2.


def main(config) -> int:
  """Serves one run to its end: 0, or 143 where it was stopped before."""
  # Not at the top: --help, and a flag or key that is refused, need no jax.
  import jax

  from diloco.checkpoint.arrays import BrokenRecord
  from diloco.monitoring import monitor_flags
  from diloco.run.bind_policy import given_access
  from diloco.run.spec import make_run_spec
  from diloco.syncer.shard_server import ShardRefused, ShardServer
  from diloco.transport.control_client import ConnectFailed
  from diloco.transport.planes import make_plane
  from diloco.transport.sockets import BadAddress, HostUnknown

  jax.config.update('jax_platforms', 'cpu')  # Devices are the learners'.
  transport, shards = config.transport, config.syncer.shards
  if not 0 < _SHARD.value < shards:
    problem = (
      f'--shard={_SHARD.value}: must be in 1 … {shards - 1} '
      f'(config.syncer.shards={shards}); shard 0 is the leader, diloco.syncer'
    )
    raise ConfigError([problem])
  with config_flags.refusing():
    access = given_access(transport, bind=None)
    monitor = monitor_flags.begin(config.name, shard_name(_SHARD.value))
    run_spec = make_run_spec(config)
  plane = make_plane(
    transport.data_plane, transport.host, access, run_spec.limits.workers
  )
  root, folder = pathlib.Path(_WORKDIR.value), config.checkpoint.folder
  workdir = Workdir(root, folder_at(folder))
  with config_flags.refusing(BrokenRecord):
    server = ShardServer(
      run_spec, _SHARD.value, _LEADER.value, plane, workdir, access, monitor
    )
  signal.signal(signal.SIGTERM, server.stop)
  signal.signal(signal.SIGINT, server.stop)
  owned = run_spec.owners.of_shard(_SHARD.value)
  logging.info('shard %d of %d: fragments %s', _SHARD.value, shards, owned)
  leader = f'--leader={_LEADER.value}'
  try:
    with config_flags.refusing(ShardRefused, BadAddress, flag=leader):
      finished = server.run()
  except (ConnectFailed, HostUnknown) as error:
    print(f'error: {leader}: {error}', file=sys.stderr)
    return 1
  finally:
    server.close()
    plane.close()
    monitor.close()
  return 0 if finished else 128 + signal.SIGTERM


if __name__ == '__main__':
  needed = ['workdir', 'shard', 'leader']
  run_command(main, required=needed, role='syncer_shard', access=True)
