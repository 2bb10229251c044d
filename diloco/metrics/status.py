# SPDX-License-Identifier: Apache-2.0
"""The syncer's status while it runs: `status.json` of the workdir.

The syncer replaces the file about once a second and once more at the end; the
launcher's table reads it. It does not influence training.
"""

import dataclasses
import json
import pathlib

from diloco.metrics import files

# States of a learner, as the syncer sees it.
JOINING = 'joining'  # Said hello, bootstrap not complete.
LIVE = 'live'  # Counts for the quorum.
GONE = 'gone'  # Its incarnation ended; none has come since.
LEFT = 'left'  # Said goodbye.


@dataclasses.dataclass(frozen=True)
class LearnerStatus:
  """The status of one learner, over all its incarnations."""

  learner: int
  state: str  # JOINING, LIVE, GONE or LEFT.
  step: int  # Inner steps of this incarnation.
  loss: float | None  # Of the last reported step, nats per token.
  tokens_per_s: float
  round: int  # The newest round that it offered for; 0 before the first.
  # Its base behind the fragment's version, at the last offer.
  lag_versions: int
  bytes_up: int  # Payload bytes pulled from it.
  bytes_down: int  # Payload bytes that it pulled.
  participation: float  # Share of the closed rounds that included it.
  incarnations: int
  stall_max_s: float  # The longest stall of one step.
  # Mean age of its merged offers; None: none, or an older file.
  age_steps: float | None = None


@dataclasses.dataclass(frozen=True)
class RunStatus:
  """The run, as the syncer sees it."""

  run: str
  time_s: float  # Seconds since the epoch at writing.
  step: int  # t, the global step.
  total_steps: int
  closed_round: int
  live: tuple[int, ...]
  participants: tuple[int, ...]  # Of the last closed round.
  quorum_s: float  # ξ_quorum, mean time from due to quorum.
  grace_s: float  # The last grace window.
  sync_s: float  # To pull and merge, in the last round.
  goodput: float  # As in `goodput.py`, since the first learner was ready.
  uptime: float
  bytes_up: int
  bytes_down: int
  refused: int  # Contributions that were not merged, over all causes.
  finished: bool
  learners: tuple[LearnerStatus, ...]  # In the order of their ids.
  age_steps: float | None = None  # Mean over all learners; see `metrics.ages`.
  old_share: float | None = None  # Share of merged offers; see `metrics.ages`.


def write_status(path: pathlib.Path, status: RunStatus) -> None:
  """Replaces the file atomically; it is sealed."""
  text = json.dumps(dataclasses.asdict(status), allow_nan=False)
  files.replace(path, files.seal(text.encode()) + b'\n')


def read_status(path: pathlib.Path) -> RunStatus | None:
  """Returns the last status, None before the first; raises
  `files.Malformed`.
  """
  return files.read_json(path, RunStatus)
