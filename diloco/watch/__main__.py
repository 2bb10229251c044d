# SPDX-License-Identifier: Apache-2.0
"""Shows a run in a browser while it goes on: diloco watch RUN

  diloco watch RUN [--port=8080]
  diloco watch RUN --write=FILE.html

RUN is the folder of a run, which may be going on or over, or of a sweep. The
page is served on loopback; from another machine: ssh -L 8080:127.0.0.1:8080
HOST. With --write it is written as one file that needs no server. Also served:
/status, the syncer's last status, and /metrics, for Prometheus.
"""

import contextlib
import pathlib
import sys

from absl import flags

from diloco.config import flags as config_flags
from diloco.config.sections import ConfigError
from diloco.metrics import files
from diloco.metrics.recorded_run import NoReport
from diloco.pages import page
from diloco.transport.sockets import LOOPBACK
from diloco.watch.folders import FollowedFolders
from diloco.watch.watch_server import WatchServer

_HOST = flags.DEFINE_string('host', LOOPBACK, 'Address to listen at.')
_PORT = flags.DEFINE_integer(
  'port', 0, 'Port to listen at; 0: any free one.', 0, 65535
)
_INSECURE = flags.DEFINE_bool(
  'insecure', False, config_flags.ACCESS_VOUCHED['insecure']
)
_WRITE = flags.DEFINE_string(
  'write', None, 'Writes the page into this file and serves nothing.'
)


def main(argv) -> int:
  """Serves until Ctrl-C, or writes; 78 where that can't be."""
  folder = pathlib.Path(argv[1])
  with config_flags.refusing(NoReport, ValueError):
    if _WRITE.value is not None:
      return _write(folder, pathlib.Path(_WRITE.value))
    try:
      server = WatchServer(folder, _HOST.value, _PORT.value, _INSECURE.value)
    except OSError as error:
      where = f'--host={_HOST.value} --port={_PORT.value}'
      raise ConfigError([f'{where}: {error.strerror}']) from None
  with server, contextlib.suppress(KeyboardInterrupt):
    print(f'{folder}: {server.url} (Ctrl-C ends it)', flush=True)
    server.serve_forever()
  return 0


def _write(folder: pathlib.Path, path: pathlib.Path) -> int:
  text = page.render(FollowedFolders([folder]).page())
  try:
    files.replace(path, text.encode())
  except OSError as error:
    raise ConfigError([f'--write={path}: {error.strerror}']) from None
  print(f'page: {path}', file=sys.stderr)
  return 0


if __name__ == '__main__':
  config_flags.run_of_runs(main)
