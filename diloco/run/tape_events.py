# SPDX-License-Identifier: Apache-2.0
"""The lines of an event tape; the name of a class is the line's kind.

The syncer's tape has the machine's decisions, `Started` and `Worked`. A
learner's tape has one line per event that changes its bits. In both, what is
not on the tape follows from what is: that is what makes a run replayable.

A learner's lines lie at its inner-step boundaries: `step` is how many inner
steps the process had made. Lines of one boundary stand in the order in which
the loop performed them.
"""

import dataclasses

from diloco.metrics.goodput import LearnerWork
from diloco.protocol import messages
from diloco.protocol.syncer import events as syncer_events

# Of the syncer ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Started:
  """A syncer's process continues from these states.

  The tuples have one item per fragment. Fragment p has Θ_p at `versions[p]`,
  whose bytes have the CRC `crcs[p]`; its outer optimizer's state and residual
  are those that belonged to `outer_versions[p]`, when Θ_p had the CRC
  `outer_crcs[p]`. A new run has version 0 everywhere. `total_steps` is the
  run's length as far as this process knows it; 0 in older tapes.
  """

  closed_round: int
  versions: tuple[int, ...]
  crcs: tuple[int, ...]
  outer_versions: tuple[int, ...]
  outer_crcs: tuple[int, ...]
  total_steps: int = 0


class Publish(syncer_events.Publish):
  """A round has closed."""

  crc: int  # CRC of Θ_p at `version`.


@dataclasses.dataclass(frozen=True)
class Worked:
  """The learners' work so far, from which goodput is computed.

  Written after each close, and when a session begins or ends.
  """

  begin_s: float  # When the first learner was ready, since the epoch.
  learners: tuple[LearnerWork, ...]


# Of a learner ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
  """The origin of a process's parameters and inner state.

  'seed': both as the configuration gives them; nothing else is set.
  'checkpoint': all that `process` of the same learner had at its `Save` of
  `step`, or, if it has no such line, when all of that boundary was done.
  'peer': the inner state as `process` of `learner` had it there; θ and the
  bases are Θ at `versions`, whose bytes have the CRCs `crcs`.
  """

  kind: str
  learner: int | None = None
  process: int | None = None
  step: int | None = None
  versions: tuple[int, ...] = ()
  crcs: tuple[int, ...] = ()


SEED = Source('seed')
SOURCES = ('seed', 'checkpoint', 'peer')


@dataclasses.dataclass(frozen=True)
class Machine:
  """The facts besides the configuration that affect the bits of a step."""

  jax: str  # JAX's version.
  platform: str  # 'cpu', 'gpu', 'tpu'.
  kind: str  # Device kind.
  fsdp: int  # The mesh.
  tensor: int
  cores: int
  threads: int  # NPROC; 0: as many as there are cores.
  xla_flags: str
  expert: int = 1  # Mesh axis; missing on older tapes.
  hosts: int = 1  # Processes of the learner; missing on older tapes.
  processor: str = ''  # Model and cache of a CPU; missing on older tapes.


@dataclasses.dataclass(frozen=True)
class Begin:
  """Bootstrap is complete; the first batch is at `position`.

  Lines before it apply to the parameters of `source`: there is no progress yet,
  so `Apply` sets θ_p to Θ_p whatever the blend rule.
  """

  process: int
  step: int
  position: int
  source: Source
  machine: Machine


class Snapshot(messages.OfferTerms, kw_only=True):
  """The fragment was copied, to be offered against the base it then had.

  A later round than its own may merge it.
  """

  process: int
  handle: int
  c_steps: int = 0  # This and the next are missing on older tapes.
  c_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Apply:
  """Θ_p of `version` was blended into θ_p and is the new base."""

  process: int
  step: int
  fragment: int
  version: int
  crc: int  # CRC of its bytes.
  carry: bool  # This and the next as in `learner.events.Apply`.
  handle: int
  merged_tokens: int
  overwritten_tokens: int


@dataclasses.dataclass(frozen=True)
class Progress:
  """The next step's schedule is at `progress`.

  Written only if that is not one more than at the step before (initially 0).
  """

  process: int
  step: int
  progress: int


@dataclasses.dataclass(frozen=True)
class Save:
  """Parameters, inner state and bases were copied for another process."""

  process: int
  step: int


@dataclasses.dataclass(frozen=True)
class Cease:
  """No more inner steps follow."""

  process: int
  step: int


@dataclasses.dataclass(frozen=True)
class Leave:
  """The process ends; if it was stopped, says what came of its last steps."""

  process: int
  step: int
  reason: str


# The words of the lines are the tape's own: a class can be renamed.
SYNCER_KINDS = {
  'Started': Started,
  'Greet': syncer_events.AdmitLearner,
  'Merge': syncer_events.Merge,
  'Publish': Publish,
  'Record': syncer_events.LogDecision,
  'End': syncer_events.End,
  'Worked': Worked,
}
LEARNER_KINDS = {
  kind.__name__: kind
  for kind in (Begin, Snapshot, Apply, Progress, Save, Cease, Leave)
}
_WORDS = {cls: word for word, cls in (SYNCER_KINDS | LEARNER_KINDS).items()}


def kind_of(said) -> str:
  """Returns the word for an event on a line of a tape."""
  return _WORDS.get(type(said), type(said).__name__)
