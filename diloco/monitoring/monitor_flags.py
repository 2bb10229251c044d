# SPDX-License-Identifier: Apache-2.0
"""The flags by which a process is told to serve `/metrics` and `/status`."""

from absl import flags, logging

from diloco.monitoring.monitor import Monitor, check_host
from diloco.transport import sockets

BIND = 'metrics_bind'
OPEN = 'metrics_open'


def define() -> None:
  """Defines --metrics_bind and --metrics_open."""
  flags.DEFINE_string(
    BIND,
    '',
    'host:port at which the process serves /metrics and /status; such as '
    '127.0.0.1:9100. Default: nowhere.',
  )
  flags.DEFINE_bool(
    OPEN,
    False,
    'Lets --metrics_bind be beyond loopback, for all that reach it.',
  )


def arguments(host: str, port: int | str) -> list[str]:
  """Returns the flags that make a process serve at an address.

  Args:
    port: its number, or the shell text that becomes it.
  """
  bind = f'--{BIND}={sockets.join(host, port)}'
  return [bind] if host == sockets.LOOPBACK else [bind, f'--{OPEN}']


def begin(run: str, process: str) -> Monitor:
  """Returns the monitor of this process, which serves if flags say so.

  A port that is taken is logged, and is no reason not to train.

  Raises:
    ValueError: no host:port, or it is not of loopback, without --metrics_open.
  """
  monitor = Monitor(run, process)
  bind, is_open = flags.FLAGS[BIND].value, flags.FLAGS[OPEN].value
  if not bind:
    return monitor
  flag = f'--{BIND}={bind}'
  try:
    host, port = sockets.split(bind)
  except sockets.BadAddress as error:
    raise ValueError(f'{flag}: {error}') from None
  check_host(host, is_open, flag, f'--{OPEN}')
  try:
    url = monitor.serve(host, port, any_name=is_open)
  except OSError as error:
    logging.error('%s: no metrics are served: %s', flag, error.strerror)
  else:
    logging.info('%s: metrics at %smetrics', process, url)
  return monitor
