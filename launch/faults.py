# SPDX-License-Identifier: Apache-2.0
"""Which of a run's faults are still to come, where the run goes on."""

from collections.abc import Sequence

from diloco.config import RunConfig
from diloco.config_faults import Kill
from diloco.metrics.status import read_status
from diloco.metrics.workdir import Workdir


def still_due(
  kills: Sequence[Kill], config: RunConfig, workdir: Workdir
) -> tuple[Kill, ...]:
  """Those that a run which goes on has not come to yet."""
  status = read_status(workdir.status)
  step = status.step if status else 0
  total_steps = config.protocol.total_steps
  return tuple(kill for kill in kills if not kill.is_due(step, total_steps))
