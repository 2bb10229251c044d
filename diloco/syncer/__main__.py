# SPDX-License-Identifier: Apache-2.0
"""The process of the syncer: python -m diloco.syncer --config=… --workdir=…"""

import dataclasses
import pathlib
import signal
import sys

from absl import flags, logging

from diloco.config import flags as config_flags
from diloco.config import pretrained
from diloco.metrics import files
from diloco.metrics.workdir import SYNCER, Workdir, folder_at
from diloco.run.command import run_command

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_BIND = flags.DEFINE_string(
  'bind', None, "host:port for learners; default: the config's, any port."
)


def main(config) -> int:
  """Serves one run to its end: 0, or 143 where it was stopped before."""
  # Not at the top: --help, and a flag or key that is refused, need no jax.
  import jax

  from diloco.checkpoint.arrays import BrokenRecord
  from diloco.monitoring import monitor_flags
  from diloco.run.bind_policy import given_access
  from diloco.run.spec import make_run_spec
  from diloco.syncer.results import ResultLost
  from diloco.syncer.server import SyncerServer
  from diloco.transport import sockets
  from diloco.transport.control_channel import BindFailed
  from diloco.transport.planes import make_plane

  jax.config.update('jax_platforms', 'cpu')  # Devices are the learners'.
  root, folder = pathlib.Path(_WORKDIR.value), config.checkpoint.folder
  workdir = Workdir(root, folder_at(folder))
  transport = config.transport
  bind = _BIND.value or f'{transport.host}:{transport.port}'
  with config_flags.refusing():
    access = given_access(transport, sockets.split(bind)[0])
    monitor = monitor_flags.begin(config.name, SYNCER)
    run_spec = make_run_spec(config)
  plane = make_plane(
    transport.data_plane, transport.host, access, run_spec.limits.workers
  )
  try:
    with config_flags.refusing(BrokenRecord):
      server = SyncerServer(
        run_spec, bind, plane, workdir, access, tell=monitor.show
      )
  except (BindFailed, sockets.HostUnknown) as error:
    print(f'error: --bind={bind}: {error}', file=sys.stderr)
    return 1
  try:
    files.write_json(workdir.config, dataclasses.asdict(config))
    if source := pretrained.of_model(config.model):
      source.keep_files(workdir.pretrained)
  except OSError as error:  # Of a run that goes on it is there already.
    logging.error('the configuration is not written: %s', error)
  signal.signal(signal.SIGTERM, server.stop)
  signal.signal(signal.SIGINT, server.stop)
  logging.info(
    'run %s: %d parameters in %d fragments, at %s',
    config.name,
    run_spec.parameters,
    config.protocol.fragments,
    server.address,
  )
  try:
    finished = server.run()
  except ResultLost as error:
    print(f'error: {error}', file=sys.stderr)
    return 1  # Started again, it looks for learners once more.
  finally:
    server.close()
    plane.close()
    monitor.close()
  return 0 if finished else 128 + signal.SIGTERM


if __name__ == '__main__':
  run_command(main, role='syncer', access=True)
