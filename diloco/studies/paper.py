# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, to stand beside simulated ones of the same setting."""

from diloco.simulation_config import FailuresConfig

# Table 1: goodput in percent by system, learners and chips, with interruptions
# of a chip once a year.
GOODPUT = {
  ('data-parallel', 1): {
    150_000: 72, 300_000: 57, 600_000: 38, 1_200_000: 27, 2_400_000: 18,
  },
  ('elastic data-parallel', 1): {
    150_000: 88, 300_000: 80, 600_000: 69, 1_200_000: 58, 2_400_000: 40,
  },
  ('Decoupled DiLoCo', 4): {
    150_000: 96, 300_000: 93, 600_000: 89, 1_200_000: 82, 2_400_000: 73,
  },
  ('Decoupled DiLoCo', 8): {
    150_000: 98, 300_000: 96, 600_000: 94, 1_200_000: 88, 2_400_000: 80,
  },
}  # fmt: skip

# Table 4: time relative to no extra learners, by extra compute during half of
# the work, as a share of the permanent compute.
SCAVENGING = {0.0: 1.0, 0.25: 0.9, 0.5: 0.83, 1.0: 0.75, 3.0: 0.62}
SCAVENGING_DATA_PARALLEL = {
  0.0: 1.0,
  0.25: 1.07,
  0.5: 1.09,
  1.0: 1.02,
  3.0: 0.8,
}

# Table 5: what it calls goodput, in percent, by `HeterogeneousStudy.SETTINGS`:
# rounds closed, of those that full speed makes due.
HETEROGENEOUS = {'K=M': 84.0, 'K=1': 100.0, 'K=1 grace': 100.0}

# What failures cost is not in the paper; these reproduce its table together.
CALIBRATION = {
  'mtbi_days': 365.0,
  'recovery': 'elastic',
  'pause_s': 13.7,
  'repair_s': 66.3,
  'redoes_step': False,
  'trace': '',
}


def is_calibration(failures: FailuresConfig) -> bool:
  """Returns True if the paper's table answers the same question."""
  return all(
    getattr(failures, key) == value for key, value in CALIBRATION.items()
  )
