# SPDX-License-Identifier: Apache-2.0
"""The bytes of one process of a learner: what it offers, what it takes in.

`WholeReplicaCodec` is for the only process of a learner, `SlicedReplicaCodec`
for one of several, which has a part of each fragment. Both give and take bytes
by shard of the syncer.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from diloco.learner import inner_device
from diloco.learner.device import Device
from diloco.learner.placement import take_boxes
from diloco.learner.replica import FragmentReplica, SlicedReplica, WholeReplica
from diloco.numerics import payload
from diloco.run import contributions
from diloco.run.host_slices import SliceMap
from diloco.run.spec import RunSpec

Arrays = Mapping[str, np.ndarray]  # Piece or box name -> f32 array.
Parts = Sequence[np.ndarray]  # uint8, by shard of the syncer.


@dataclasses.dataclass(frozen=True)
class ArrivedFragment:
  """A fragment of Θ at one version, on the host and on the devices."""

  host: Arrays
  device: Mapping[str, jax.Array]
  crc: int  # CRC of the whole fragment.


class ReplicaCodec(Protocol):
  """The arrays that one host of a learner encodes and takes in."""

  slice_map: SliceMap
  host: int

  def encode_delta(
    self, fragment: int, theta: Mapping[str, jax.Array], reference: Mapping
  ) -> Parts:
    """Returns the bytes of v = reference − θ; see `OwnProgress.reference`."""

  def encode_held(self, fragment: int) -> Parts:
    """Returns the bytes of the host's copy of Θ_p, in f32."""

  def held(self) -> list[FragmentReplica]:
    """Returns the host's copy of Θ."""

  def take_in(
    self,
    fragment: int,
    version: int,
    full: bool,
    parts: Parts,
    crc: int,
    part_crcs: Sequence[int],
  ) -> None:
    """Takes in an update or a full fragment; raises `Mismatch` if it does not
    fit.
    """

  def placed(self, fragment: int) -> ArrivedFragment:
    """Puts the host's copy of a fragment on the devices as well."""

  def donated_bytes(self, fragment: int) -> int:
    """Returns how many bytes of Θ_p this process gives to a newcomer."""

  def encode_donated(self, fragment: int, theta: Arrays) -> np.ndarray:
    """Returns the bytes of Θ_p for a newcomer, in f32; may be empty."""

  def state_bytes(self) -> int:
    """Returns how many bytes of inner state this process gives."""

  def state_chunks(self, state) -> list[np.ndarray]:
    """Returns the inner state's bytes from a copy on the devices, in chunks."""

  def state_from_chunks(self, chunks: Sequence[np.ndarray]):
    """Returns a state for `Device.put_state`; `ValueError` on a wrong size."""

  def adopt(
    self,
    versions: Sequence[int],
    data: Sequence[np.ndarray],
    crcs: Sequence[int],
  ) -> None:
    """Takes in a donor's Θ, by fragment; on `Mismatch` nothing is taken."""


class WholeReplicaCodec:
  """Whole pieces, for a learner's only process.

  Args:
    device: takes fragments of Θ.
    copy: the host's copy of Θ.
  """

  def __init__(self, run_spec: RunSpec, device: Device, copy: WholeReplica):
    self._run_spec = run_spec
    self._device = device
    self._copy = copy
    self.slice_map = SliceMap(run_spec.owners, None)
    self.host = 0

  def encode_delta(self, fragment, theta, reference) -> Parts:
    pieces = self._run_spec.layout.fragments[fragment]
    codec = self._run_spec.up
    data = contributions.encode(reference, theta, pieces, codec)
    return self._run_spec.owners.split(data, fragment, codec)

  def encode_held(self, fragment) -> Parts:
    pieces = self._run_spec.layout.fragments[fragment]
    full = self._run_spec.full
    data = payload.encode(self._copy.held()[fragment].theta, pieces, full)
    return self._run_spec.owners.split(data, fragment, full)

  def held(self) -> list[FragmentReplica]:
    return self._copy.held()

  def take_in(self, fragment, version, full, parts, crc, part_crcs) -> None:
    codec = self._run_spec.full if full else self._run_spec.down
    data = self._run_spec.owners.join(parts, fragment, codec)
    take_in = self._copy.replace if full else self._copy.update
    take_in(fragment, version, data, crc)

  def placed(self, fragment) -> ArrivedFragment:
    return _placed(self._device, fragment, self._copy.held()[fragment])

  def donated_bytes(self, fragment) -> int:
    pieces = self._run_spec.layout.fragments[fragment]
    return payload.payload_bytes(pieces, self._run_spec.full)

  def encode_donated(self, fragment, theta) -> np.ndarray:
    pieces = self._run_spec.layout.fragments[fragment]
    return payload.encode(theta, pieces, self._run_spec.full)

  def state_bytes(self) -> int:
    return inner_device.size_bytes(self._device.state_like)

  def state_chunks(self, state) -> list[np.ndarray]:
    return inner_device.to_chunks(state)

  def state_from_chunks(self, chunks):
    return inner_device.from_chunks(chunks, self._device.state_like)

  def adopt(self, versions, data, crcs) -> None:
    self._copy.adopt(versions, data, crcs)


class SlicedReplicaCodec:
  """Slices of pieces, for one process among several.

  Args:
    device: takes fragments of Θ.
    copy: the copy of this host's slices of Θ.
  """

  def __init__(self, run_spec: RunSpec, device: Device, copy: SlicedReplica):
    self._run_spec = run_spec
    self._device = device
    self._copy = copy
    self.slice_map = copy.slice_map
    self.host = copy.host

  def encode_delta(self, fragment, theta, reference) -> Parts:
    holding = self._device.holding
    own = take_boxes(holding.offered[fragment], theta)
    if isinstance(next(iter(reference.values()), None), jax.Array):
      held = take_boxes(holding.offered[fragment], reference)
    else:
      held = holding.offered_of(fragment, reference)
    codec = self._run_spec.up
    return tuple(
      contributions.encode(
        {box.name: held[box.name] for box in boxes}, own, boxes, codec
      )
      for boxes in self._by_shard(fragment)
    )

  def encode_held(self, fragment) -> Parts:
    theta = self._copy.held()[fragment].theta
    held = self._device.holding.offered_of(fragment, theta)
    full = self._run_spec.full
    return tuple(
      payload.encode(held, boxes, full) for boxes in self._by_shard(fragment)
    )

  def held(self) -> list[FragmentReplica]:
    return self._copy.held()

  def take_in(self, fragment, version, full, parts, crc, part_crcs) -> None:
    take_in = self._copy.replace if full else self._copy.update
    take_in(fragment, version, parts, crc, part_crcs)

  def placed(self, fragment) -> ArrivedFragment:
    return _placed(self._device, fragment, self._copy.held()[fragment])

  def donated_bytes(self, fragment) -> int:
    boxes = self._device.holding.needed[fragment]
    return payload.payload_bytes(boxes, self._run_spec.full)

  def encode_donated(self, fragment, theta) -> np.ndarray:
    boxes = self._device.holding.needed[fragment]
    return payload.encode(theta, boxes, self._run_spec.full)

  def state_bytes(self) -> int:
    return inner_device.shards_size_bytes(self._device.state_like)

  def state_chunks(self, state) -> list[np.ndarray]:
    return inner_device.shards_to_chunks(state)

  def state_from_chunks(self, chunks):
    return inner_device.shards_from_chunks(chunks, self._device.state_like)

  def adopt(self, versions, data, crcs) -> None:
    needed, full = self._device.holding.needed, self._run_spec.full
    thetas = [payload.decode(x, boxes, full) for x, boxes in zip(data, needed)]
    self._copy.take_over(
      [
        FragmentReplica(*each)
        for each in zip(versions, thetas, crcs, strict=True)
      ]
    )

  def _by_shard(self, fragment: int):
    for shard in range(self._run_spec.owners.shards):
      yield self.slice_map.offered(fragment, self.host, shard)


def make_part(
  run_spec: RunSpec, device: Device, copy: WholeReplica | SlicedReplica
) -> ReplicaCodec:
  """Returns the implementation that fits the copy."""
  if isinstance(copy, WholeReplica):
    return WholeReplicaCodec(run_spec, device, copy)
  return SlicedReplicaCodec(run_spec, device, copy)


class ArrivedFragments:
  """Fragments that are ready to be applied, until the loop takes them."""

  def __init__(self):
    self._arrived: dict[tuple[int, int], ArrivedFragment] = {}

  def put(self, fragment: int, version: int, arrived: ArrivedFragment):
    self._arrived[fragment, version] = arrived

  def take(self, fragment: int, version: int) -> ArrivedFragment | None:
    """Returns the fragment to apply and forgets older ones.

    It is None if the version came twice and was applied before.
    """
    taken = self._arrived.pop((fragment, version), None)
    for key in list(self._arrived):
      if key[0] == fragment and key[1] < version:
        del self._arrived[key]
    return taken


def _placed(
  device: Device, fragment: int, held: FragmentReplica
) -> ArrivedFragment:
  placed = device.put_fragment(fragment, held.theta)
  return ArrivedFragment(held.theta, placed, held.crc)
