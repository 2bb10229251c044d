# SPDX-License-Identifier: Apache-2.0
"""Bytes at the sockets: what a synced parameter costs on the wire."""

import pytest

from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from tests.processes.processes import ENDLESS, START_S, Processes

pytestmark = pytest.mark.soak

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
  'run.step_floor_s=0.05',  # Steps, not the cores, set the pace of rounds.
)
PARAMETERS = (  # N, 361,088.
  2 * 256 * 128  # Embedding and output head.
  + 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)  # Attention, MLP.
  + 5 * 128  # Norms.
)
WARM_UP_ROUNDS = 8
TRIES = 3
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
  with m the updates that it took in, is the down leg.

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
    # A process that is held up costs a pull in vain, or a whole fragment; what
    # each round costs is there each time.
    for _ in range(TRIES):
      figures = _measured(processes)
      print(data_plane, figures)
      if all(BYTES_MIN <= each <= BYTES_MAX for each in figures.values()):
        break
    else:
      pytest.fail(f'{figures} are not {BYTES_MIN} to {BYTES_MAX}')


def _measured(processes: Processes) -> dict[str, float]:
  """Returns bytes per parameter over the next rounds, by leg."""
  begins = [processes.steps(m)[-1] for m in (0, 1)]
  closed = len(processes.tape('Publish'))
  processes.until(
    lambda: len(processes.tape('Publish')) >= closed + ROUNDS,
    START_S,
    f'{ROUNDS} rounds close',
  )
  figures = {}
  for m, begin in enumerate(begins):
    end = processes.steps(m)[-1]
    pulls = sum(
      begin[names.TIME] < close['time_s'] <= end[names.TIME]
      for close in processes.merged(m)
    )
    updates = sum(
      line['kind'] == 'Apply' and begin['step'] < line['step'] <= end['step']
      for line in read_jsonl(processes.workdir.learner_tape(m))
    )
    for leg, name, rounds in (
      ('up', names.SOCKET_SENT, pulls),
      ('down', names.SOCKET_RECEIVED, updates),
    ):
      nbytes = (end[name] - begin[name]) * FRAGMENTS
      figures[f'{leg} of learner {m}'] = nbytes / (rounds * PARAMETERS)
  return figures
