# SPDX-License-Identifier: Apache-2.0
"""A shard beside the syncer's lead: python -m diloco.syncer_shard --shard=1 …

The lead is `diloco.syncer`. Exit codes are its own: 0, the run is over; 78,
it can't run as configured; 143, it was stopped.
"""

import os
import pathlib
import signal
import sys

import jax
from absl import flags, logging

from diloco.checkpoint.arrays import BrokenRecord
from diloco.config import flags as config_flags
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import Workdir
from diloco.run import logs
from diloco.run.exposure import open_access
from diloco.run.spec import make_run_spec
from diloco.syncer.shard_server import LeadAbsent, ShardRefused, ShardServer
from diloco.transport.control_client import ConnectFailed
from diloco.transport.planes import make_plane
from diloco.transport.sockets import BadAddress, HostUnknown

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_SHARD = flags.DEFINE_integer('shard', None, 'Its number, from 1.')
_LEAD = flags.DEFINE_string('lead', None, 'host:port of the lead.')


def main(_) -> int:
  """Serves one run to its end: 0, or 143 where it was stopped before."""
  config = config_flags.load()
  logs.keep_ours(config.name, **config_flags.who())
  jax.config.update('jax_platforms', 'cpu')  # Devices are the learners'.
  transport, shards = config.transport, config.syncer.shards
  if not 0 < _SHARD.value < shards:
    problem = (
      f'--shard={_SHARD.value}: must be in 1 … {shards - 1} '
      f'(config.syncer.shards={shards}); shard 0 is the lead, diloco.syncer'
    )
    config_flags.exit_config(ConfigError([problem]))
  try:
    access = open_access(
      config_flags.access_files(),
      transport,
      bind=None,
      **config_flags.access_vouched(),
      proxy=config_flags.proxy(),
    )
    run_spec = make_run_spec(config)
  except (ValueError, FileNotFoundError) as error:
    config_flags.exit_config(ConfigError([str(error)]))
  plane = make_plane(
    transport.data_plane, transport.host, access, run_spec.limits.workers
  )
  workdir = Workdir(pathlib.Path(_WORKDIR.value))
  try:
    sharding = ShardServer(
      run_spec, _SHARD.value, _LEAD.value, plane, workdir, access
    )
  except BrokenRecord as error:
    config_flags.exit_config(ConfigError([str(error)]))
  signal.signal(signal.SIGTERM, sharding.stop)
  signal.signal(signal.SIGINT, sharding.stop)
  owned = run_spec.owners.of_shard(_SHARD.value)
  logging.info('shard %d of %d: fragments %s', _SHARD.value, shards, owned)
  try:
    finished = sharding.run()
  except (ShardRefused, BadAddress) as error:
    config_flags.exit_config(ConfigError([f'--lead={_LEAD.value}: {error}']))
  except (LeadAbsent, ConnectFailed, HostUnknown) as error:
    print(f'error: --lead={_LEAD.value}: {error}', file=sys.stderr)
    return 1
  finally:
    sharding.close()
    plane.close()
  return 0 if finished else 128 + signal.SIGTERM


if __name__ == '__main__':
  config_flags.define_flags()
  config_flags.define_log_flags()
  config_flags.define_access_flags()
  config_flags.define_proxy_flag()
  flags.mark_flags_as_required(['workdir', 'shard', 'lead'])
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  if config_flags.asks_for_json(sys.argv):
    logs.write_json('syncer_shard')
  config_flags.run(main)
