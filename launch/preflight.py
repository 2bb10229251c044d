# SPDX-License-Identifier: Apache-2.0
"""Finds what a run on this machine would fail of, before a process starts.

Its processes would say the same, each in its log, after seconds or minutes.
"""

import errno
import importlib.util
import os
import pathlib
import re
import socket
import symtable
from collections.abc import Mapping, Sequence

from diloco.config import (
  data_section,
  flags,
  lab_section,
  own_code,
  run_config,
  unlike,
)
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import check_folder
from diloco.run.initial_weights import open_weights
from diloco.transport import sockets
from launch import chips
from launch.program import FORCED, XLA_FLAGS, Processes, Role


def check(config: RunConfig) -> None:
  """Looks for all that a configuration and the flags for access name.

  Raises:
    ConfigError: it is not there, or can't be used.
  """
  unlike.for_each_kind(
    config, config.protocol.learners, lambda setup: check_data(setup.config)
  )
  with flags.refusing():
    check_folder(config.checkpoint.folder)
  check_own_code(config)
  with flags.refusing():
    open_weights(config.model)
  check_access(config)
  lab_section.plan(config.faults, config.protocol.learners)


def check_keeps_own(config: RunConfig) -> None:
  """Refuses one place of checkpoints for the several runs of a command."""
  if folder := config.checkpoint.folder:
    raise ConfigError(
      f"checkpoint.folder={folder!r}: must be '': there are several runs here"
    )


def check_data(config: RunConfig) -> None:
  """Looks for the data, and for the packages that read them.

  Raises:
    ConfigError: they are not there, or too short.
  """
  for look in (
    data_section.missing_paths,
    data_section.missing_packages,
    data_section.too_short_text,
  ):
    if problems := list(look(config.data)):
      raise ConfigError(problems)


def check_access(config: RunConfig) -> None:
  """Reads the files of the flags for access, as each process will.

  Raises:
    ConfigError: one can't be used, or strangers could connect.
  """
  # Not at the top: it imports gRPC, which launching elsewhere does without.
  from diloco.run import bind_policy

  host = config.transport.host
  with flags.refusing():
    if host in ('0.0.0.0', '::'):
      raise ValueError(
        f'transport.host={host!r}: learners can not connect to it; give an '
        'address of this machine, such as 127.0.0.1'
      )
    for bind in (host, None):  # A syncer, which listens; a learner.
      bind_policy.open_access(
        flags.access_files(), config.transport, bind, **flags.access_vouched()
      )


def check_own_code(config: RunConfig) -> None:
  """Looks for the user's own functions; imports packages only.

  Raises:
    ConfigError: there is no such module, or it has no such function.
  """
  own_code.make_searchable()
  broken = []
  for key, value in run_config.own_code_of(config):
    module, name = own_code.parts(value)
    try:
      spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
      spec = None
    if spec is None:
      why = (
        f'there is no module {module} in {os.getcwd()} or where Python looks'
      )
    elif spec.origin and not _may_have(pathlib.Path(spec.origin), name):
      why = f'{spec.origin} has no function {name}'
    else:
      continue
    broken.append(f'{key}={value!r}: {why}')
  if broken:
    raise ConfigError(broken)


def _may_have(path: pathlib.Path, name: str) -> bool:
  """Returns False if a module's source gives it no such name.

  Where that takes more than reading it, its process says so.
  """
  try:
    source = path.read_text()
    table = symtable.symtable(source, str(path), 'exec')
  except (OSError, ValueError, SyntaxError):  # Such as of compiled code.
    return True
  if re.search(r'import \*|\b(__getattr__|globals|global|exec)\b', source):
    return True
  found = {x.get_name() for x in table.get_symbols() if x.is_local()}
  return name in found


def check_devices(
  config: RunConfig,
  learners: Sequence[Processes],
  environment: Mapping[str, str],
  root: pathlib.Path,
) -> None:
  """Refuses a mesh that has more devices than the CPU gives its processes.

  Args:
    learners: the processes of each.
    environment: the launcher's.
    root: where `dev` and `sys` are looked through for accelerators.

  Raises:
    ConfigError: it has, and there is no accelerator that JAX could use.
  """
  here = chips.local_devices(environment, root)
  if here is not None and chips.has_plugin(here.platform):
    return
  setups = unlike.setups(config, len(learners))
  for i, (role, setup) in enumerate(zip(learners, setups, strict=True)):
    mesh = setup.config.mesh
    xla_flags = dict(role.environment).get(
      XLA_FLAGS, environment.get(XLA_FLAGS, '')
    )
    forced = re.findall(rf'{FORCED}=(\d+)', xla_flags)
    asked = environment.get('JAX_NUM_CPU_DEVICES') or '1'
    devices = role.hosts * int(forced[-1] if forced else asked)
    if mesh.devices != devices:
      raise ConfigError(
        [
          f'{mesh.product} = {mesh.devices} devices: learner {i} has '
          f'{devices} here, of the CPU; --cpu_devices makes as many as the '
          'mesh has out of CPU cores'
        ]
      )


def free_address(host: str, port: int) -> str:
  """Returns a free 'host:port'; port 0 finds any.

  Raises:
    ConfigError: the host is unknown, not of this machine, or the port taken.
  """
  try:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except socket.gaierror as error:
    raise ConfigError(
      [f'transport.host={host!r}: can not be resolved ({error.strerror})']
    ) from None
  family, *_, address = addresses[0]
  try:
    free = port or sockets.free_port(address[0])
    socket.create_server((address[0], free), family=family).close()
  except OSError as error:
    raise ConfigError([_refused(host, port, error)]) from None
  return sockets.join(host, free)


def check_metrics_ports(roles: Sequence[Role]) -> None:
  """Refuses ports of /metrics at which something listens.

  Raises:
    ConfigError: names the first.
  """
  for role in roles:
    for port in range(role.metrics_port, role.metrics_port + role.hosts):
      with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
          probe.bind((sockets.LOOPBACK, port))
        except OSError as error:
          raise ConfigError(
            [f'--metrics_port: port {port} of {role.name}: {error.strerror}']
          ) from None


def _refused(host: str, port: int, error: OSError) -> str:
  if error.errno == errno.EADDRINUSE:
    return f'transport.port={port}: is in use on {host}; 0 finds a free one'
  if error.errno == errno.EADDRNOTAVAIL:
    return f'transport.host={host!r}: is no address of this machine'
  return f'transport.host={host!r}, transport.port={port}: {error.strerror}'
