# SPDX-License-Identifier: Apache-2.0
"""The syncer's process: python -m diloco.syncer --config=… --workdir=…"""

import os
import pathlib
import signal
import sys

import jax
from absl import flags, logging

from diloco import flags as config_flags
from diloco.checkpoint.volumes import BrokenRecord
from diloco.config_values import ConfigError
from diloco.metrics.workdir import Workdir
from diloco.runtime import logs
from diloco.runtime.blueprint import make_blueprint
from diloco.runtime.exposure import refuse_strangers
from diloco.runtime.syncing import Syncing
from diloco.transport import addresses
from diloco.transport.addresses import HostUnknown
from diloco.transport.listen import BindFailed
from diloco.transport.planes import make_plane

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_BIND = flags.DEFINE_string(
  'bind', None, "host:port for learners; default: the config's, any port."
)

_INSECURE = flags.DEFINE_bool(
  'insecure', False, 'Listens beyond loopback: the network is private.'
)


def main(_) -> int:
  """Serves one run to its end: 0, or 143 where it was stopped before."""
  config = config_flags.load()
  logs.keep_ours()
  jax.config.update('jax_platforms', 'cpu')  # Devices are the learners'.
  workdir = Workdir(pathlib.Path(_WORKDIR.value))
  transport = config.transport
  bind = _BIND.value or f'{transport.host}:{transport.port}'
  try:
    for flag, host in (
      ('bind', addresses.split(bind)[0]),
      ('config.transport.host', transport.host),
    ):
      refuse_strangers(f'--{flag}', host, _INSECURE.value)
    blueprint = make_blueprint(config)
  except (ValueError, FileNotFoundError) as error:
    config_flags.exit_config(ConfigError([str(error)]))
  plane = make_plane(transport.data_plane, transport.host)
  try:
    syncing = Syncing(blueprint, bind, plane, workdir)
  except (BindFailed, HostUnknown) as error:
    print(f'error: --bind={bind}: {error}', file=sys.stderr)
    return 1
  except BrokenRecord as error:
    config_flags.exit_config(ConfigError([str(error)]))
  signal.signal(signal.SIGTERM, syncing.stop)
  signal.signal(signal.SIGINT, syncing.stop)
  logging.info(
    'run %s: %d parameters in %d fragments, at %s',
    config.name,
    blueprint.parameters,
    config.protocol.fragments,
    syncing.address,
  )
  try:
    finished = syncing.run()
  finally:
    syncing.close()
    plane.close()
  return 0 if finished else 128 + signal.SIGTERM


if __name__ == '__main__':
  config_flags.define_flags()
  flags.mark_flag_as_required('workdir')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  config_flags.run(main)
