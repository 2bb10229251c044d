# SPDX-License-Identifier: Apache-2.0
"""The benchmarks by name, in the order of the table; a new one is an entry."""

from diloco.bench import (
  checkpoint_stalls,
  fault_gaps,
  simulated_steps,
  start_times,
  sync_stalls,
  syncer_load,
  syncer_rounds,
)
from diloco.bench.measurement import BenchRow

HOSTS = 'hosts'  # The row that `diloco plan` knows hosts from.
ROWS = {
  'stall': BenchRow(
    'stall of a step by syncing, compute as a sleep', sync_stalls.measure, 120.0
  ),
  'checkpoint': BenchRow(
    "stall of a learner's step by its own checkpoint",
    lambda settings: [
      *sync_stalls.measure_saving(settings),
      *checkpoint_stalls.measure(settings),
    ],
    150.0,
  ),
  'blocking': BenchRow(
    'round trip that a step waits for at τ = 0',
    sync_stalls.measure_blocking,
    40.0,
  ),
  'bytes': BenchRow(
    'bytes at the sockets, each full sync', sync_stalls.measure_bytes, 20.0
  ),
  'slower': BenchRow(
    'goodput beside a learner that is twice as slow',
    sync_stalls.measure_slower,
    30.0,
  ),
  'decoder': BenchRow(
    'step of a small decoder, with and without syncing',
    sync_stalls.measure_decoder,
    40.0,
  ),
  'learner-killed': BenchRow(
    'kill -9 of a learner: the survivor, and the respawn',
    fault_gaps.measure_learner_killed,
    30.0,
  ),
  'syncer-killed': BenchRow(
    'kill -9 of the syncer: its first merge, and the steps',
    fault_gaps.measure_syncer_killed,
    40.0,
  ),
  'memory': BenchRow(
    "the syncer's memory, by parameter", syncer_load.measure_memory, 40.0
  ),
  'served': BenchRow(
    'learners that a syncer serves', syncer_load.measure_served, 60.0
  ),
  'round': BenchRow(
    "the syncer's round and its parts, on one core", syncer_rounds.measure, 30.0
  ),
  HOSTS: BenchRow(
    'what hosts do with a fragment, for `diloco plan`',
    syncer_rounds.measure_hosts,
    20.0,
  ),
  'shards': BenchRow(
    'what two shards merge, beside one', syncer_rounds.measure_shards, 30.0
  ),
  'int4': BenchRow(
    'the codec of the wire, on one core', syncer_rounds.measure_int4, 10.0
  ),
  'codecs': BenchRow(
    'the other codecs, on one core', syncer_rounds.measure_others, 20.0
  ),
  'lab': BenchRow('a step in the lab', simulated_steps.measure_lab, 20.0),
  'simulator': BenchRow(
    'a simulated learner-step, by the number of learners',
    simulated_steps.measure,
    20.0,
  ),
  'start': BenchRow('start of the processes', start_times.measure, 20.0),
}
