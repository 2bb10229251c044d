# SPDX-License-Identifier: Apache-2.0
"""The outputs of a learner's train loop: checkpoints, metrics and the tape."""

import dataclasses

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.metrics.writer import Writer
from diloco.runtime.tape import LearnerTape


@dataclasses.dataclass(frozen=True)
class Outputs:
  """The outputs of one process."""

  checkpoints: LearnerRecords
  metrics: Writer
  tape: LearnerTape
