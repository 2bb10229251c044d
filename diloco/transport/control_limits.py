# SPDX-License-Identifier: Apache-2.0
"""The limits of the control plane, and constants that both sides share."""

import dataclasses

from diloco.transport import wire

METHOD = '/diloco.ControlPlane/Converse'
# Sent before all messages: a refused call has headers, too.
ACCEPTED = (('diloco-session', 'accepted'),)


@dataclasses.dataclass(frozen=True)
class ControlLimits:
  """Limits per server, session and connection; all are positive.

  Attributes:
    sessions_max: learners that may be connected at once.
    outgoing_max: messages that wait for a slow reader before it is cut off.
    message_bytes_max: bytes of one message, either way.
    handshake_s: time for a session to say hello.
    close_s: time for a closed session to receive the reason.
    keepalive_s: silence after which the connection itself is probed.
    keepalive_timeout_s: time for the answer to the probe. A process that is
      stopped for a shorter time keeps its connection.
  """

  sessions_max: int = 64
  outgoing_max: int = 8192
  message_bytes_max: int = wire.MESSAGE_BYTES_MAX
  handshake_s: float = 5.0
  close_s: float = 1.0
  keepalive_s: float = 10.0
  keepalive_timeout_s: float = 20.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not value > 0:
        raise ValueError(f'limits: {field.name}={value}, must be > 0')
    if self.message_bytes_max > wire.MESSAGE_BYTES_MAX:
      raise ValueError(
        f'limits: message_bytes_max={self.message_bytes_max}, at most '
        f'{wire.MESSAGE_BYTES_MAX}'
      )

  def channel_options(self) -> tuple[tuple[str, int], ...]:
    """Returns the keepalive settings as gRPC options."""
    return (
      ('grpc.keepalive_time_ms', int(self.keepalive_s * 1000)),
      ('grpc.keepalive_timeout_ms', int(self.keepalive_timeout_s * 1000)),
      ('grpc.http2.max_pings_without_data', 0),
      ('grpc.http2.max_ping_strikes', 0),
    )


DEFAULT = ControlLimits()
