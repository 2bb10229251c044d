# SPDX-License-Identifier: Apache-2.0
"""The traffic of each system on a link between data centres."""

import dataclasses

from diloco.sim import fifo_link, traffic_forms
from diloco.sim.payload_bytes import bytes_per_value, fragment_shares
from diloco.simulation_config import SimulationConfig

BF16_BYTES = 2.0
FOUR_BITS_BYTES = 0.5  # As the paper counts int4: no scales.
DATA_PARALLEL = 'data-parallel bf16'


@dataclasses.dataclass(frozen=True)
class Method:
  """One system on one link.

  Attributes:
    name: name of its row and its line.
    decoupled: True for Decoupled DiLoCo.
    cycle: its traffic.
    form: its closed form.
    step_s: T.
  """

  name: str
  decoupled: bool
  cycle: fifo_link.Cycle
  form: traffic_forms.Bursts | traffic_forms.Stream
  step_s: float

  def utilisation(self, gbps: float, steps: int) -> float:
    """Simulated, over so many steps."""
    return fifo_link.utilisation(self.cycle, self.step_s, gbps, steps)


def methods(
  config: SimulationConfig, datacentres: int, step_s: float
) -> tuple[Method, ...]:
  """The rows of a table: systems between D data centres, at a step time.

  Data-parallel and the DiLoCos in lock-step all-reduce: f = 2(1 − 1/D) of the
  model. A learner of Decoupled DiLoCo exchanges with shards of the syncer that
  are spread over the data centres: f' = 1 − 1/D each way, on a link that takes
  both ways at once.
  """
  values = config.network.params * traffic_forms.all_reduce_share(datacentres)
  every, buckets = config.protocol.sync_every_steps, config.study.buckets
  bf16 = _gbit(values, BF16_BYTES)
  codec = config.codec
  own_bytes = max(
    bytes_per_value(name, codec.block_size, codec.scale)
    for name in (codec.up, codec.down)
  )
  embedding = config.network.embedding_share
  one_way = values / 2
  stream = _Streams(config, step_s)
  own = codec.up if codec.up == codec.down else f'{codec.up}/{codec.down}'
  return (
    Method(
      DATA_PARALLEL,
      False,
      fifo_link.data_parallel(bf16, step_s, buckets),
      traffic_forms.Bursts(bf16, step_s, buckets),
      step_s,
    ),
    Method(
      'DiLoCo bf16',
      False,
      fifo_link.diloco(bf16, step_s, buckets, every),
      traffic_forms.Bursts(bf16, step_s, buckets, every),
      step_s,
    ),
    stream.method('streaming DiLoCo bf16', False, bf16, 0.0),
    stream.method(
      'streaming DiLoCo 4-bit', False, _gbit(values, FOUR_BITS_BYTES), 0.0
    ),
    stream.method(
      'Decoupled DiLoCo bf16', True, _gbit(one_way, BF16_BYTES), embedding
    ),
    stream.method(
      'Decoupled DiLoCo 4-bit', True, _gbit(one_way, FOUR_BITS_BYTES), embedding
    ),
    stream.method(
      f'Decoupled DiLoCo {own}, as here', True, _gbit(one_way, own_bytes), 0.0
    ),
  )


@dataclasses.dataclass(frozen=True)
class _Streams:
  """Makes methods that send fragment by fragment."""

  config: SimulationConfig
  step_s: float

  def method(
    self, name: str, decoupled: bool, gbit: float, embedding: float
  ) -> Method:
    """Returns the method for a model of `gbit`.

    `embedding` is the share of an embedding fragment.
    """
    protocol = self.config.protocol
    fragments, every = protocol.fragments, protocol.sync_every_steps
    sizes = [gbit * share for share in fragment_shares(fragments, embedding)]
    overlap = protocol.overlap_steps
    return Method(
      name,
      decoupled,
      fifo_link.streaming(sizes, self.step_s, every, overlap),
      traffic_forms.Stream(
        sizes[0], sizes[-1], fragments, self.step_s, every, overlap
      ),
      self.step_s,
    )


def _gbit(values: float, nbytes: float) -> float:
  return 8 * values * nbytes / 1e9
