# SPDX-License-Identifier: Apache-2.0
"""Reads the event files of TensorBoard, without TensorFlow."""

import pathlib

from tensorboardX.proto import event_pb2


def read(path: pathlib.Path) -> list[event_pb2.Event]:
  """TFRecord framing: length u64, its CRC u32, the event, its CRC u32."""
  data, events = path.read_bytes(), []
  while data:
    length = int.from_bytes(data[:8], 'little')
    events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
    data = data[16 + length :]
  return events
