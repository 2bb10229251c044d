# SPDX-License-Identifier: Apache-2.0
"""The state of a simulated learner's steps and jobs, and its messages."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.state import LearnerState
from diloco.simulator.contents import LearnerBackend
from diloco.simulator.network import Cargo

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


class PullQueue:
  """One thread's pulls: a learner makes one at a time, in turn.

  Args:
    process: the learner's process, whose pulls end with it.
    cluster: the cluster that it is part of.
  """

  def __init__(self, process, cluster):
    self._process = process
    self._cluster = cluster
    self._waiting: collections.deque[Callable[[], None]] = collections.deque()

  def add(
    self,
    source: int,
    cargo: Cargo,
    fragment: int,
    arrived: Callable[[], Sequence[learner_events.Event]],
    wanted: Callable[[], bool] = lambda: True,
    begins: Sequence[Callable[[], None]] = (),
  ):
    """Queues a pull; the process handles what `arrived` returns then.

    Args:
      wanted: asked when its turn comes; False drops it.
      begins: called as the pull of each piece begins, if there are any: the
        pieces are those of one pull, or several pulls at one go.
    """
    sim, wires = self._cluster.sim, self._cluster.wires
    missing = len(begins) or wires.pieces(cargo)

    def arrive():
      nonlocal missing
      missing -= 1
      if self._process.gone:
        self._waiting.clear()
      elif missing:
        pull_a_piece()
      else:
        self._end()
        for event in arrived():
          self._process.handle(event)

    def pull_a_piece():
      target = self._process.id
      if begins:
        begins[-missing]()
      when_s = wires.arrival_s(sim.now, source, target, cargo, fragment)
      sim.at(when_s, lambda: self._process.when_it_runs(arrive))

    def begin():
      if wanted():
        pull_a_piece()
      else:
        self._end()

    self._waiting.append(begin)
    if len(self._waiting) == 1:
      begin()

  def _end(self):
    self._waiting.popleft()
    if self._waiting:
      self._waiting[0]()


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
