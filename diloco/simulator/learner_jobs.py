# SPDX-License-Identifier: Apache-2.0
"""The state of a simulated learner's steps and jobs, and its messages."""

import dataclasses
from collections.abc import Callable, Iterable

from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.state import LearnerState
from diloco.simulator.contents import LearnerBackend

SESSION_BITS = 12  # In an incarnation; the rest is the process number.
RISES_MAX = 8  # How often it takes a newer number, as in a run.
OFFERS_MAX = 8  # Per fragment, not released by the syncer; as in a run.
OTHER_HANDLES = 1 << 40  # First handle of payloads that are not offers.


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
  """An inner step that has not been reported."""

  tokens: int
  position: int  # Of the batch after it.
  loss: float


@dataclasses.dataclass(frozen=True)
class EncodingJob:
  """A job of the encoding thread."""

  incarnation: int
  of_step: int  # Its input is available once this step is done.
  do: Callable[[], None]


def saved_start(
  state: LearnerState, crcs: Iterable[int], position: int
) -> Start:
  """Returns what a process restored from this state starts with."""
  return Start(
    source=f'its checkpoint of step {state.step}',
    crcs=tuple(crcs),
    versions=tuple(f.base for f in state.fragments),
    from_steps=tuple(f.from_step for f in state.fragments),
    from_tokens=tuple(f.from_tokens for f in state.fragments),
    step=state.step,
    tokens=state.tokens,
    position=position,
    closed_round=state.closed_known,
    global_step=state.global_step,
  )


def offer_of(
  snapshot: learner_events.Snapshot, payload: messages.Payload
) -> messages.Offer:
  """Announces what was copied."""
  return messages.Offer(
    round=snapshot.round,
    fragment=snapshot.fragment,
    base_version=snapshot.base_version,
    c_steps=snapshot.c_steps,
    c_tokens=snapshot.c_tokens,
    step=snapshot.step,
    payload=payload,
  )


def state_offered(
  effect: learner_events.DonateState,
  contents: LearnerBackend,
  payloads: tuple[messages.Payload, ...],
  address: str,
) -> messages.StateOffered:
  """Announces a donation."""
  return messages.StateOffered(
    learner=effect.learner,
    incarnation=effect.incarnation,
    versions=tuple(contents.versions),
    crcs=tuple(contents.crcs),
    step=effect.step,
    payloads=payloads,
    address=address,
  )
