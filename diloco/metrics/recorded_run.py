# SPDX-License-Identifier: Apache-2.0
"""The contents of a run's folder, as values; `run_reader` reads them.

What is missing or broken is left out, and listed among the absent files and the
gaps: a reader that needs a whole run refuses one that has any.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from diloco.metrics.goodput import StepRecord
from diloco.metrics.recorded_faults import RecordedFault
from diloco.metrics.status import Evaluation, RunStatus

SYNCER = 'syncer'  # The name of its process.

# The few values of a run's config.json that its page needs.
#
# Other keys are ignored, so that runs of older versions of this package, with
# other keys, can be read as well.
KEYS = {
  'name': ('name',),
  'learners': ('protocol', 'learners'),
  'fragments': ('protocol', 'fragments'),
  'total_steps': ('protocol', 'total_steps'),
  'batch': ('data', 'batch'),
  'seq_len': ('data', 'seq_len'),
}


class NoReport(Exception):
  """A folder of which no page can be made; says why."""


@dataclasses.dataclass(frozen=True)
class Setup:
  """The configured values."""

  name: str
  learners: int  # M.
  fragments: int  # P.
  total_steps: int
  batch: int
  seq_len: int

  @property
  def tokens_per_step(self) -> int:
    """Tokens of one learner's inner step."""
    return self.batch * self.seq_len


def read(path: pathlib.Path) -> Setup:
  """Reads an existing config.json.

  Raises:
    NoReport: it is not one of a run.
  """
  try:
    config = json.loads(path.read_text())
  except ValueError as error:
    raise NoReport(f'{path}: is not JSON: {error}') from None
  return Setup(**{name: _value(path, config, name) for name in KEYS})


def _value(path: pathlib.Path, config, name: str):
  kind, value = Setup.__annotations__[name], config
  for key in KEYS[name]:
    value = value.get(key) if isinstance(value, dict) else None
  if type(value) is not kind or (kind is int and value < 1):
    key = '.'.join(KEYS[name])
    raise NoReport(f'{path}: {key}={value!r}, no configuration of a run')
  return value


@dataclasses.dataclass(frozen=True)
class Life:
  """One process, from its start to its death; seconds as in `RecordedRun`."""

  process: str  # 'syncer', 'learner-0', …
  started_s: float  # By the launcher.
  start: str = ''  # The launcher's number of it, such as 'start 1'.
  # When it first appears on the syncer's tape: a learner's hello, a
  # syncer's first line; None: never.
  spoke_s: float | None = None
  # Start of a learner's first inner step; None: it made none.
  stepped_s: float | None = None
  # When it was killed, or when the launcher noticed its end; inf: it was
  # still running.
  ended_s: float = float('inf')
  death: str = ''  # How it died; '' if it left in good order or runs on.

  @property
  def used_s(self) -> float | None:
    """Returns when it was first of use; None: never."""
    return self.spoke_s if self.process == SYNCER else self.stepped_s


def absences(lives: Sequence[Life]) -> Iterator[tuple[float, float, str]]:
  """Yields (begin, end, 'bootstrap' or 'dead') of one process; inf: no end."""
  for life in lives:
    used_s = life.ended_s if life.used_s is None else life.used_s
    yield life.started_s, used_s, 'bootstrap'
  for dead, back in itertools.pairwise(lives):
    yield dead.ended_s, back.started_s, 'dead'
  if lives and lives[-1].death:
    yield lives[-1].ended_s, float('inf'), 'dead'


@dataclasses.dataclass(frozen=True)
class RoundShare:
  """The part of one learner in a round."""

  learner: int
  weight: float
  age_s: float  # Of its offer, when the window ended.
  behind: int  # Versions between its base and the newest one; 0: none.
  age_steps: float | None = None  # In its own; None on older tapes.


@dataclasses.dataclass(frozen=True)
class RecordedRound:
  """A round that closed; seconds as in `RecordedRun`."""

  number: int
  at_s: float  # When its update was published.
  step: int  # t.
  shares: tuple[RoundShare, ...]
  # From due to quorum; None where no line tells, as of `grace_s`.
  quorum_s: float | None
  grace_s: float | None  # From quorum to the end of the window.
  sync_s: float  # From the first pull to the end of the merge.
  reason: str  # Why the window ended.

  @property
  def times_s(self) -> tuple[float, float, float]:
    """Returns when it was due, had its quorum, and when its window ended."""
    window_s = max(0.0, self.at_s - self.sync_s)
    quorum_s = max(0.0, window_s - (self.grace_s or 0.0))
    return max(0.0, quorum_s - (self.quorum_s or 0.0)), quorum_s, window_s


@dataclasses.dataclass(frozen=True)
class Loss:
  """Nats per token, of a batch of training or of held-out text."""

  at_s: float
  tokens: int  # Trained by all learners until then.
  loss: float
  steps: int = 1  # That it stands for.


@dataclasses.dataclass(frozen=True)
class RecordedRun:
  """A run as far as it is known; seconds since its first learner was ready."""

  label: str  # Tells it from the others of the page.
  folder: pathlib.Path
  setup: Setup
  # Inner steps of all learners in the order of time; of those that were not
  # written, the mean.
  steps: tuple[StepRecord, ...]
  training: tuple[Loss, ...]  # Losses in the order of time.
  # Of the global model on held-out text, likewise.
  validation: tuple[Loss, ...]
  rounds: tuple[RecordedRound, ...]  # That closed, in order.
  records: Mapping[str, int]  # Of the syncer's tape, how many of each kind.
  # Of each process that the launcher started.
  lives: Mapping[str, tuple[Life, ...]]
  # (process, begin, end) of those that were stopped for a while; the end of
  # one that did not go on is inf.
  pauses: tuple[tuple[str, float, float], ...]
  joined: frozenset[str]  # Learners' processes that said hello to the syncer.
  # When the launcher first stopped a process; None: it stopped none.
  stopped_s: float | None
  until_s: float  # Of the last thing that is known of it.
  last_s: float  # The same, since the epoch.
  ended: bool  # The syncer's tape says that the run is over.
  # What the syncer counted; of a run without one, what its tape tells.
  status: RunStatus | None
  evaluation: Evaluation | None
  absent: tuple[str, ...]  # Files that are not there.
  # What is broken, in sentences that begin with the file.
  gaps: tuple[str, ...]
  # Those of a plan, as `launch.chaos` has judged them.
  faults: tuple[RecordedFault, ...] = ()

  @property
  def learners(self) -> range:
    return range(self.setup.learners)

  @property
  def goodput(self) -> float | None:
    return self.status.goodput if self.status else None

  def deaths(self) -> tuple[Life, ...]:
    """Lives that ended in a death within the run, in the order of time."""
    return tuple(x for x in deaths(self.lives) if x.ended_s <= self.until_s)


def deaths(lives: Mapping[str, tuple[Life, ...]]) -> list[Life]:
  """Returns the lives that ended in a death, in the order of time."""
  dead = [life for lived in lives.values() for life in lived if life.death]
  return sorted(dead, key=lambda life: life.ended_s)
