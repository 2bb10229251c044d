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

ROWS = {
  'stall': BenchRow(
    'stall of a step by syncing, compute as a sleep',
    sync_stalls.measure,
  ),
  'checkpoint': BenchRow(
    "stall of a learner's step by its own checkpoint",
    lambda settings: [
      *sync_stalls.measure_saving(settings),
      *checkpoint_stalls.measure(settings),
    ],
  ),
  'blocking': BenchRow(
    'round trip that a step waits for at τ = 0', sync_stalls.measure_blocking
  ),
  'bytes': BenchRow(
    'bytes at the sockets, each full sync', sync_stalls.measure_bytes
  ),
  'slower': BenchRow(
    'goodput beside a learner that is twice as slow',
    sync_stalls.measure_slower,
  ),
  'decoder': BenchRow(
    'step of a small decoder, with and without syncing',
    sync_stalls.measure_decoder,
  ),
  'learner-killed': BenchRow(
    'kill -9 of a learner: the survivor, and the respawn',
    fault_gaps.measure_learner_killed,
  ),
  'syncer-killed': BenchRow(
    'kill -9 of the syncer: its first merge, and the steps',
    fault_gaps.measure_syncer_killed,
  ),
  'memory': BenchRow(
    "the syncer's memory, by parameter", syncer_load.measure_memory
  ),
  'served': BenchRow(
    'learners that a syncer serves', syncer_load.measure_served
  ),
  'round': BenchRow(
    "the syncer's round and its parts, on one core",
    syncer_rounds.measure,
  ),
  'shards': BenchRow(
    'what two shards merge, beside one',
    syncer_rounds.measure_shards,
  ),
  'int4': BenchRow(
    'the codec of the wire, on one core', syncer_rounds.measure_int4
  ),
  'codecs': BenchRow(
    'the other codecs, on one core', syncer_rounds.measure_others
  ),
  'lab': BenchRow('a step in the lab', simulated_steps.measure_lab),
  'simulator': BenchRow(
    'a simulated learner-step, by the number of learners',
    simulated_steps.measure,
  ),
  'start': BenchRow('start of the processes', start_times.measure),
}
