# SPDX-License-Identifier: Apache-2.0
"""Where a learner's loop writes what it did."""

import dataclasses

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.metrics.writer import Writer
from diloco.runtime.tape import LearnerTape


@dataclasses.dataclass(frozen=True)
class Outputs:
  """Of one process."""

  checkpoints: LearnerRecords
  metrics: Writer
  tape: LearnerTape
