# SPDX-License-Identifier: Apache-2.0
"""What a learner's machine knows, as one value, and who holds it."""

import dataclasses

from diloco.protocol import learner_io
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.grace import Ema


@dataclasses.dataclass(frozen=True)
class Fragment:
  """How the learner stands to one fragment. Versions count its closes."""

  base: int = 0  # What θ_p was last set to; offers are relative to it.
  host: int = 0  # The newest that the host holds, proven by its CRC.
  coming: int = 0  # What the host holds once the fetches under way are done.
  crc: int = 0  # Of the host's copy.
  applied: bool = True  # Whether θ_p was set to the host's copy.
  from_step: int = 0  # Own steps and tokens that θ_p has no progress of.
  from_tokens: int = 0
  offered_round: int = 0  # The newest round that it was offered for.
  offered_step: int | None = None  # Of that snapshot, if since the base.
  offered_tokens: int = 0
  wanted: bool = False  # The full fragment is asked for, or will be.
  ask_at_s: float | None = None  # When it will be; None: it is.
  asked_at_s: float = float('-inf')


@dataclasses.dataclass(frozen=True)
class State:
  """All that the machine knows: compared, saved, restored."""

  fragments: tuple[Fragment, ...]
  now: float = float('-inf')
  connected: bool = False  # Welcomed, that is.
  began: bool = False  # Bootstrap is complete; it trains.
  parked: bool = False  # τ = 0: the loop waits at its boundary.
  ceased: bool = False  # No more inner steps.
  left: bool = False
  step: int = 0  # Own inner steps, dispatched, and their tokens.
  tokens: int = 0
  completed_step: int = 0
  step_s: Ema = dataclasses.field(default=Ema())
  position: int = 0  # Of the data, at the start.
  closed_known: int = 0
  last_offered: int = 0
  offered_at_step: int = 0
  lead: int = 0
  again_round: int = 0  # To be offered again, if it is still open.
  global_step: int = 0  # t at the last update, plus own steps since.
  last_round: int | None = None  # Set by `Finish`.
  done: bool = False
  said_at_s: float = float('-inf')  # Its last message to the syncer.
  fetched: tuple[int, ...] = ()  # Handles to name in the next report.


class Core:
  """What the parts of the machine share: the state, and what they want."""

  def __init__(self, config: ProtocolConfig, learner: int, state: State):
    self.config = config
    self.learner = learner
    self.state = state
    self.effects: list[learner_io.Effect] = []

  def set(self, **fields):
    self.state = dataclasses.replace(self.state, **fields)

  def set_fragment(self, p: int, **fields):
    fragments = list(self.state.fragments)
    fragments[p] = dataclasses.replace(fragments[p], **fields)
    self.set(fragments=tuple(fragments))

  def send(self, message):
    self.set(said_at_s=self.state.now)
    self.effects.append(learner_io.Send(message))
