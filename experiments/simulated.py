# SPDX-License-Identifier: Apache-2.0
"""Every key of a simulation with its default, in the one place for defaults."""

import math

import ml_collections

from experiments import common

ON_THE_WIRE = ('up', 'down', 'block_size', 'scale', 'error_feedback')

SECTIONS = {
  'fleet': {
    'chips': 1_200_000,  # N, of all learners together.
    'slice_chips': 256,  # What is lost, and comes back, at once.
    'step_s': 1.0,  # Of an inner step of a whole learner.
    'tokens': 1 << 20,  # Of an inner step of a whole learner.
    'slow_learners': 0,  # How many are slower than the others.
    'slow_gap': 0.18,  # By how much: the share of steps that they lack.
    'jitter': 0.0,  # Standard deviation of a step's length, as a share.
    'drift': 0.0,  # Of a learner's speed, per √hour, as a share.
  },
  'failures': {
    'mtbi_days': 365.0,  # Between two interruptions of one chip; inf: none.
    'recovery': 'elastic',  # 'elastic', 'wait' or 'restart'.
    'pause_s': 13.7,  # Of a reconfiguration: our fit to the paper's Table 1.
    'repair': 'exponentiated_weibull',  # Or 'exponential', 'constant'.
    'repair_s': 66.3,  # Mean; with one pause 80 s, our fit to Table 1.
    # The paper names the distribution, not its parameters.
    'repair_shape': 1.5,  # k of the exponentiated Weibull.
    'repair_power': 1.0,  # Its a; 1: a plain Weibull.
    'redoes_step': False,  # If not, the lost step is part of pause_s.
    'syncer_mtbi_hours': math.inf,  # Between two deaths of the syncer.
    'syncer_outage_s': 30.0,  # Until it listens again.
    'trace': '',  # CSV of a cluster's failures; '': drawn.
  },
  'network': {
    'params': 5e9,  # Of the model.
    'datacentres': 1,  # D.
    'learner_gbps': math.inf,  # Of a learner's link, each way.
    'syncer_gbps': math.inf,  # Of the syncer's, shared by all.
    'latency_s': 0.01,  # One way.
    'encode_s': 0.02,  # Of a fragment, at the learner.
    'merge_s': 0.05,  # Of a fragment, at the syncer.
    'state_bytes_per_param': 12.0,  # θ and two moments in f32.
    'embedding_share': 0.0,  # In a fragment of its own; 0: all are equal.
  },
}


def base(kind: str) -> ml_collections.ConfigDict:
  """A valid simulation; experiments change what they are about.

  `diloco/config/simulation.py` holds the type and the rules of every key.

  Args:
    kind: of the study, a key of STUDY.
  """
  run = common.base()
  config = ml_collections.ConfigDict()
  config.name = kind
  config.seed = 0  # Of the first of `study.seeds` runs.

  config.update(SECTIONS)
  config.codec = ml_collections.ConfigDict(
    {key: run.codec[key] for key in ON_THE_WIRE}
  )
  config.protocol = ml_collections.ConfigDict(
    {key: run.protocol[key] for key in run.protocol if key != 'blend_alpha'}
  )
  config.protocol.update(  # The paper's settings.
    learners=8,
    fragments=24,
    sync_every_steps=24,
    overlap_steps=2,
    quorum=1,
    grace_cap_steps=1.0,
    total_steps=10**9,  # The study says when it ends.
  )
  config.study = ml_collections.ConfigDict(
    {'kind': kind, 'seeds': 3, **STUDY[kind]}
  )
  return config


STUDY = {
  'goodput': {
    'systems': (
      'data-parallel',
      'elastic data-parallel',
      'synchronous DiLoCo',
      'streaming DiLoCo',
      'Decoupled DiLoCo',
    ),
    'chips': (150_000, 300_000, 600_000, 1_200_000, 2_400_000),
    'learners': (2, 4, 8, 16),
    'learner_hours': 16.0,  # Simulated, of one cell and seed.
    'timeline_s': 300.0,  # Drawn, of the largest fleet.
  },
  'bandwidth': {
    'datacentres': (2, 8),
    'steps_s': (1.0,),
    'utilisations': (0.5, 0.75, 0.9, 0.95, 0.99),
    'buckets': 128,
    'steps': 2000,
    'gbps': (0.1, 0.2, 0.43, 0.86, 1.7, 3.4),
  },
  'heterogeneous': {
    'settings': ('K=M', 'K=1', 'K=1 grace', 'K=1 latest', 'K=1 grace latest'),
    'steps': 2000,
    'timeline_s': 30.0,
  },
  'scavenging': {
    'extra': (0, 1, 2, 4, 12),
    'begin': 0.25,
    'end': 0.75,
    'steps': 1000,
    'notice_s': 5.0,
  },
  'offer_age': {
    'learners': (2, 4, 8, 16),
    'fragments': (1, 2, 4, 8, 24),
    'overlaps': (1, 6),
    'far_steps': 0.7,
    'far_overlap': 4,
    'steps': 960,
  },
}
