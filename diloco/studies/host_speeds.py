# SPDX-License-Identifier: Apache-2.0
"""Measured speeds of a host's work on a fragment.

Seconds per GB of the fragment in f32, int4 with blocks of 128, on one of two
cores that other processes shared: the best of nine calls of the functions that
learner and syncer run, on 8 M values. All of it runs on one thread per stage.
"""

ENCODE_S = 1.0  # Learner: base − θ, and int4 of it.
TAKE_IN_S = 1.1  # Learner: Θ_p from the update, and its CRC.
PULL_S = 0.75  # Syncer, of each contribution, side by side: decode, check.
MERGE_S = 0.5  # Syncer: RDA …
MERGE_EACH_S = 0.36  # … and of each contribution.
OUTER_STEP_S = 3.3  # Syncer: Nesterov, int4 of the update, residual, CRC.


def merge_s(learners: int) -> float:
  """Returns seconds per GB of the syncer's merge of `learners`
  contributions.
  """
  return MERGE_S + MERGE_EACH_S * learners + OUTER_STEP_S
