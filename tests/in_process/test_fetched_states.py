# SPDX-License-Identifier: Apache-2.0
"""A learner of several hosts takes a donor's state on all of them, or on none.

These are the leading hosts of a donor and of a newcomer, with real bytes
between them; what their other hosts do, the test says.
"""

import jax
import numpy as np
import pytest

from diloco.checkpoint.learner_records import HeldState
from diloco.config import run_config
from diloco.learner.hosts.host_group import HostGroup
from diloco.learner.hosts.host_transfer import OFFERS_MAX
from diloco.learner.programs import LearnerPrograms
from diloco.learner.replica import whole_replica
from diloco.learner.transfers import FragmentTransfer
from diloco.protocol import host_messages, messages
from diloco.protocol.learner import events as learner_events
from diloco.run.spec import make_run_spec
from diloco.transport.data_plane import PeerLost
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny

DONOR, NEWCOMER = (1, 4096), (0, 8192)
VERSION, STEP = 3, 7


class OtherHost(HostGroup):
  """Host 1 of a learner of two.

  Attributes:
    lost: whether the donor's host 1 dies while it pulls from it.
    told: how each fetch ended, as the leading host said.
  """

  def __init__(self):
    super().__init__()
    self.count = 2
    self.lost = False
    self.told: list[bool] = []

  def tell(self, message):
    if isinstance(message, host_messages.FetchOver):
      self.told.append(message.taken)

  def answers(self, job, timeout_s=0.0):
    if self.lost:
      return {1: host_messages.HostDone(job, 'PeerLost: gone')}
    return {1: host_messages.HostDone(job, '', ('its host 1',))}


class LosingPlane(MemoryPlane):
  """Pulls fail from a given one on, as if the other end had died.

  Attributes:
    left: pulls that succeed; None: all.
  """

  left: int | None = None

  def fetcher(self, address):
    fetcher = super().fetcher(address)
    take = fetcher.pull

    def pull(payload, timeout_s):
      if self.left is not None:
        if not self.left:
          raise PeerLost('gone')
        self.left -= 1
      return take(payload, timeout_s)

    fetcher.pull = pull
    return fetcher


class Pair:
  """A donor that offers its state, and a newcomer with other parameters."""

  def __init__(self):
    self._run_spec = make_run_spec(run_config.build(tests_tiny.get_config()))
    self._programs = LearnerPrograms(self._run_spec)
    network = MemoryNetwork()
    self.hosts, self.plane = OtherHost(), LosingPlane(network)
    initial = self._run_spec.initial_fragments()
    self.copy = whole_replica(self._run_spec, initial)
    self.newcomer = self._carrier(self.copy, self.plane, self.hosts)
    self.given = [
      {name: x + np.float32(1) for name, x in theta.items()}
      for theta in initial
    ]
    self._donated = whole_replica(
      self._run_spec, self.given, (VERSION,) * len(initial)
    )
    self._network = network
    self.donor = self.donor_of(HostGroup())

  def donor_of(self, hosts: HostGroup) -> FragmentTransfer:
    """The donor's leading host."""
    plane = MemoryPlane(self._network)
    return self._carrier(self._donated, plane, hosts)

  def _carrier(self, copy, plane, hosts) -> FragmentTransfer:
    return FragmentTransfer(self._run_spec, self._programs, copy, plane, hosts)

  def donate(self) -> messages.StateAt:
    """The donor offers it all once (more)."""
    _, state = self._programs.init(self._run_spec.initial_parameters())
    handles = self.donor.donation_handles('')
    said = host_messages.DonateAt(*NEWCOMER, handles, '')
    held = HeldState(None, state)
    offered = self.donor.donate(said, STEP, self._donated.held(), held)
    return messages.StateAt(*DONOR, offered)

  def versions(self) -> set[int]:
    return {held.version for held in self.copy.held()}


@pytest.fixture
def pair():
  return Pair()


def test_a_donation_that_can_not_begin_lets_go_of_the_boundary(pair):
  released = []
  held = HeldState(None, None, lambda: released.append(True))
  said = host_messages.DonateAt(*NEWCOMER, (1,), 'of no mesh')
  with pytest.raises(ValueError):
    pair.donor.donate(said, STEP, [], held)
  assert released


@pytest.mark.parametrize('host', [0, 1])
def test_a_donor_that_loses_a_host_in_mid_pull_gives_nothing(host, pair):
  """Whichever it was: no host uses what it has, until another donor gives."""
  before = [held.theta for held in pair.copy.held()]
  if host:
    pair.hosts.lost = True
  else:
    pair.plane.left = 1
  said = pair.newcomer.fetch_state(pair.donate())
  assert isinstance(said, learner_events.StateFailed)
  assert 'PeerLost' in said.reason
  assert pair.versions() == {0}
  assert [held.theta for held in pair.copy.held()] == before
  assert pair.newcomer.take_adopted()[0] is None
  assert pair.hosts.told == [False]

  pair.hosts.lost, pair.plane.left = False, None
  said = pair.newcomer.fetch_state(pair.donate())
  assert isinstance(said, learner_events.StateFetched)
  assert pair.versions() == {VERSION}
  for held, given in zip(pair.copy.held(), pair.given):
    jax.tree.map(np.testing.assert_array_equal, dict(held.theta), given)
  assert pair.newcomer.take_adopted()[1].step == STEP
  assert pair.hosts.told == [False, True]


def test_a_host_that_has_left_a_session_is_told_of_and_nothing_stays(pair):
  """The syncer waits for an answer, and each copy is a whole fragment."""
  other = OtherHost()
  donor = pair.donor_of(other)
  donor.open_session(5)
  other.lost = True
  for _ in range(OFFERS_MAX):
    answer = donor.donate_fragment(0, session=5)
    assert isinstance(answer, messages.NoFragment)
    assert 'host 1' in answer.reason
  assert donor.has_room(5, 0)

  other.lost = False
  answer = donor.donate_fragment(0, session=5)
  assert isinstance(answer, messages.FragmentOffered)
  assert answer.version == VERSION
