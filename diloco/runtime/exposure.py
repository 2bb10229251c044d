# SPDX-License-Identifier: Apache-2.0
"""Refuses to listen where strangers could connect, unless told to."""

from diloco.transport.addresses import is_loopback


def refuse_strangers(flag: str, host: str, insecure: bool) -> None:
  """Nothing authenticates a peer yet: only loopback is safe by itself.

  Args:
    flag: what names the host, for the message.
    host: where a server will listen.
    insecure: the operator vouches for the network.

  Raises:
    ValueError: `host` can be reached from other machines, and nobody vouched.
  """
  if not insecure and not is_loopback(host):
    raise ValueError(
      f'{flag}={host}: other machines could connect, and peers are not '
      'authenticated yet; on a private network, pass --insecure'
    )
