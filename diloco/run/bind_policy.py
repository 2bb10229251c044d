# SPDX-License-Identifier: Apache-2.0
"""Decides which peers may connect; refuses to listen where strangers could."""

import dataclasses
import hashlib
import hmac
from collections.abc import Mapping

from absl import logging

from diloco.config import flags
from diloco.config.sections import TransportConfig
from diloco.transport import auth, planes
from diloco.transport.sockets import HostUnknown, is_literal, is_loopback, split


def given_access(transport: TransportConfig, bind: str | None) -> auth.Access:
  """Opens the access that the flags of this process ask for."""
  return open_access(
    flags.access_files(),
    transport,
    bind,
    **flags.access_vouched(),
    proxy=flags.proxy(),
  )


def open_access(
  files: Mapping[str, str | None],
  transport: TransportConfig,
  bind: str | None,
  insecure: bool,
  transfer_fenced: bool,
  proxy: str = '',
) -> auth.Access:
  """Reads a process's credentials before it listens anywhere.

  Args:
    files: the fields of `auth.AccessFiles`.
    bind: where the control plane will listen; None: a learner, which connects.
    insecure: the operator vouches for the network.
    transfer_fenced: the operator states that only this run's machines reach the
      ports of jax_transfer and of JAX itself. They know neither TLS nor tokens,
      and stray bytes on one may abort the process, however well the control
      plane is guarded.
    proxy: host:port of an HTTP proxy for connections by gRPC; '': none.

  Raises:
    auth.BadAccess: a file can't be used.
    ValueError: strangers could connect, and the operator did not vouch; or
      `proxy` is not host:port.
    HostUnknown: a host name does not resolve.
  """
  plane = planes.PLANES[transport.data_plane]
  access = auth.read(
    auth.AccessFiles(**files),
    serves=bind is not None or plane.guarded,
    connects=bind is None or plane.guarded,
  )
  if bind is not None:
    _refuse_strangers(f'--bind={bind}', bind, access, insecure)
  host, flag = transport.host, f'--config.transport.host={transport.host}'
  if plane.guarded:
    _refuse_strangers(flag, host, access, insecure)
  elif not (transfer_fenced or insecure or is_loopback(host)):
    raise ValueError(
      f'{flag}: {transport.data_plane} accepts every connection to its '
      "ports; let a firewall keep all but the run's machines out and pass "
      '--transfer_fenced, or use '
      f'--config.transport.data_plane={" or ".join(planes.GUARDED)}'
    )
  if proxy:
    split(proxy)
    access = dataclasses.replace(access, proxy=proxy)
  return access


def group_secret(access: auth.Access, secret: str, learner: int) -> bytes:
  """Derives the secret by which the hosts of one learner authenticate.

  It is derived from what each host was given beforehand, the run's token and
  the launcher's secret, and is never sent. If neither is given, which
  `check_group` allows on loopback or a private network only, any process could
  derive it.

  Args:
    secret: the launcher's, new at each start; '': none.
  """
  known = f'{access.token or ""}\n{secret}'
  text = f'hosts of learner {learner}'
  return hmac.digest(known.encode(), text.encode(), hashlib.sha256)


def check_group(
  coordinator: str,
  transport: TransportConfig,
  has_secret: bool,
  insecure: bool,
  transfer_fenced: bool,
  named: str = 'coordinator',
) -> None:
  """Refuses a learner of several hosts if a stranger could be one of them.

  Args:
    coordinator: host:port where its hosts meet.
    has_secret: True if the hosts share a secret.
    insecure: the operator vouches for the network.
    named: the flag that names the coordinator, or the rendezvous.

  Raises:
    ValueError: strangers could connect, and the operator did not vouch.
  """
  if insecure or _within(coordinator, transport.host):
    return
  flag = f'--{named}={coordinator}'
  if not has_secret:
    raise ValueError(
      f'{flag}: the hosts of this learner know each other by the token; give '
      '--token_file, or on a private network --insecure'
    )
  if not transfer_fenced:
    raise ValueError(
      f'{flag}: jax.distributed, and what runs between the devices of several '
      'hosts, accepts every connection to its ports; let a firewall keep all '
      "but the run's machines out and pass --transfer_fenced"
    )


def _within(coordinator: str, own: str) -> bool:
  """Returns True if all hosts of a learner are on this machine, by address."""
  host, _ = split(coordinator)
  try:
    met = is_loopback(host)
  except HostUnknown:  # Not yet: the first host may be coming up.
    return False
  # A machine may take its own name for loopback where others do not.
  return met and (host == 'localhost' or is_literal(host) or is_loopback(own))


def _refuse_strangers(
  flag: str, host: str, access: auth.Access, insecure: bool
) -> None:
  """Requires a gRPC server beyond loopback to authenticate its peers."""
  if is_loopback(host):
    return
  if not access.knows_peers and not insecure:
    raise ValueError(
      f'{flag}: other machines could connect without proving who they are; '
      'give --tls_ca, --tls_cert and --tls_key, or --token_file, or on a '
      'private network --insecure'
    )
  if access.token is not None and access.server is None:
    logging.warning(
      '%s: without --tls_cert the token travels in the clear', flag
    )
