# SPDX-License-Identifier: Apache-2.0
"""The benchmarks by name, in the order of the table; a new one is an entry."""

from diloco.bench import (
  checkpoint_stalls,
  crowd,
  process_rows,
  simulated_steps,
  syncer_rounds,
)
from diloco.bench.measurement import BenchRow

HOSTS = 'hosts'  # The row that `diloco plan` knows hosts from.
ROWS = {
  'stall': BenchRow(
    'stall of a step by syncing, compute as a sleep',
    process_rows.measure_stall,
    120.0,
  ),
  'checkpoint': BenchRow(
    "stall of a learner's step by its own checkpoint",
    lambda settings: [
      *process_rows.measure_saving(settings),
      *checkpoint_stalls.measure(settings),
    ],
    150.0,
  ),
  'blocking': BenchRow(
    'round trip that a step waits for at τ = 0',
    process_rows.measure_blocking,
    40.0,
  ),
  'bytes': BenchRow(
    'bytes at the sockets, each full sync', process_rows.measure_bytes, 20.0
  ),
  'slower': BenchRow(
    'goodput beside a learner that is twice as slow',
    process_rows.measure_slower,
    30.0,
  ),
  'decoder': BenchRow(
    'step of a small decoder, with and without syncing',
    process_rows.measure_decoder,
    40.0,
  ),
  'learner-killed': BenchRow(
    'kill -9 of a learner: the survivor, and the respawn',
    process_rows.measure_learner_killed,
    30.0,
  ),
  'syncer-killed': BenchRow(
    'kill -9 of the syncer: its first merge, and the steps',
    process_rows.measure_syncer_killed,
    40.0,
  ),
  'memory': BenchRow(
    "the syncer's memory, by parameter", process_rows.measure_memory, 40.0
  ),
  'served': BenchRow(
    'learners that a syncer serves', crowd.measure_served, 60.0
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
  'start': BenchRow('start of the processes', process_rows.measure_start, 20.0),
}
