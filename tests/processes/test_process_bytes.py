# SPDX-License-Identifier: Apache-2.0
"""Bytes at the sockets: what a synced parameter costs on the wire."""

import pytest

from diloco.metrics import names
from tests.processes.processes import ENDLESS, START_S, Processes

pytestmark = pytest.mark.beside

FRAGMENTS = 4  # P.
MODEL = (
  'model.layers=2',
  'model.d_model=128',
  'model.heads=4',
  'model.kv_heads=2',
  'model.head_dim=32',
  'model.d_ff=256',
)
PROTOCOL = (
  f'protocol.fragments={FRAGMENTS}',
  'protocol.sync_every_steps=24',
  'protocol.overlap_steps=6',
)
PARAMETERS = (  # N, 361,088.
  2 * 256 * 128  # Embedding and output head.
  + 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)  # Attention, MLP.
  + 5 * 128  # Norms.
)
WARM_UP_ROUNDS = 8
ROUNDS = 48  # 12 round trips of all fragments: an edge is 2 % of it.
BYTES_MAX = 0.56  # Per parameter, leg, and round trip of all fragments.
# Below, the sockets were not counted, or more rounds than were carried.
BYTES_MIN = 0.48


@pytest.mark.parametrize('data_plane', ['jax_transfer', 'grpc'])
def test_bytes_per_parameter_at_the_sockets(tmp_path, data_plane):
  """Done-when 3: at most 0.56 bytes per parameter, leg and round trip.

  Each learner counts the TCP payload of all its sockets, control plane,
  framing and keepalives included; joining and warm-up are left out by taking
  differences between two of its records. Between them n rounds merged the
  learner: n pulls of one of P fragments, that is n / P round trips of all N
  parameters. So what it sent, over N · n / P, is the up leg. It received
  every update, whether it took part or not: what it received, over N · m / P
  with m the rounds that closed, is the down leg.

  By the codec alone it is 4 bits and a bf16 scale for each block of 128, that
  is (128 / 2 + 2) / 128 = 0.516. That leaves 0.044 · N = 15.7 kB for everything
  else in the 24 steps and 4 rounds of one round trip.
  """
  plane = f'transport.data_plane={data_plane}'
  with Processes(tmp_path, *MODEL, *PROTOCOL, *ENDLESS, plane) as processes:
    syncer = processes.syncer()
    assert f': {PARAMETERS} parameters in' in syncer.output
    for m in (0, 1):
      processes.learner(m)
    for m in (0, 1):
      processes.until_merged(m, WARM_UP_ROUNDS)
    begins = [processes.steps(m)[-1] for m in (0, 1)]
    closed = len(processes.tape('Publish'))
    processes.until(
      lambda: len(processes.tape('Publish')) >= closed + ROUNDS,
      START_S,
      f'{ROUNDS} rounds close',
    )
    ends = [processes.steps(m)[-1] for m in (0, 1)]
    for m, begin, end in zip((0, 1), begins, ends):
      up = _per_parameter(names.SOCKET_SENT, begin, end, processes.merged(m))
      down = _per_parameter(
        names.SOCKET_RECEIVED, begin, end, processes.tape('Publish')
      )
      print(f'{data_plane} learner {m}: {up=:.4f} {down=:.4f}')
      assert BYTES_MIN <= up <= BYTES_MAX, f'{m=} {up=} {down=}'
      assert BYTES_MIN <= down <= BYTES_MAX, f'{m=} {up=} {down=}'


def _per_parameter(name: str, begin: dict, end: dict, closes: list) -> float:
  """Bytes between two records over the parameters that the rounds carried."""
  rounds = sum(
    begin[names.TIME] < close['time_s'] <= end[names.TIME] for close in closes
  )
  return (end[name] - begin[name]) * FRAGMENTS / (rounds * PARAMETERS)
