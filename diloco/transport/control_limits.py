# SPDX-License-Identifier: Apache-2.0
"""The bounds of the control plane, and what both of its sides share."""

import dataclasses

from diloco.transport import wire

METHOD = '/diloco.ControlPlane/Converse'
# Sent ahead of all messages: a call that is refused has headers, too.
ACCEPTED = (('diloco-session', 'accepted'),)


@dataclasses.dataclass(frozen=True)
class ControlLimits:
  """Bounds per server, session and connection; all are positive.

  Attributes:
    sessions_max: learners that may be connected at once.
    outgoing_max: messages that wait for a slow reader before it is cut off.
    message_bytes_max: of one message, either way.
    handshake_s: within which a session must have said hello.
    close_s: how long a session that is closed may take to hear the reason.
    keepalive_s: silence after which the connection itself is probed.
    keepalive_timeout_s: how long the answer to the probe may take. A process
      that is stopped for a shorter time keeps its connection.
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
    """gRPC's names of the keepalive figures."""
    return (
      ('grpc.keepalive_time_ms', int(self.keepalive_s * 1000)),
      ('grpc.keepalive_timeout_ms', int(self.keepalive_timeout_s * 1000)),
      ('grpc.http2.max_pings_without_data', 0),
      ('grpc.http2.max_ping_strikes', 0),
    )


DEFAULT = ControlLimits()
