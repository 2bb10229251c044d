# SPDX-License-Identifier: Apache-2.0
"""Holds the protocol's constants for one run, checked at construction."""

import dataclasses
import math

from diloco.protocol.weights import WEIGHTS

# Encoded updates of a fragment that stay on offer to a session, the newest: as
# many bytes as the full fragment at 4 bits, so that more would not pay.
UPDATES_KEPT = 8


@dataclasses.dataclass(frozen=True)
class Admission:
  """The rule that says which offers a round takes.

  Attributes:
    waits_for_clock: True if a learner's pace clock must have reached the round.
  """

  waits_for_clock: bool


ADMISSIONS = {'latest': Admission(False), 'fresh': Admission(True)}


@dataclasses.dataclass(frozen=True)
class Blending:
  """The traits of a blend that the machines act on.

  `numerics.blend` computes the blend itself.

  Attributes:
    mixes: True if it leaves a share of θ, the configuration's α, beside Θ_p.
    carries: True if progress made since the merged copy stays in θ.
  """

  mixes: bool = False
  carries: bool = False


BLENDS = {
  'overwrite': Blending(),
  'mix': Blending(mixes=True),
  'carry': Blending(carries=True),
}


@dataclasses.dataclass(frozen=True)
class ProtocolConfig:
  """Settings that syncer and learners share (the paper's Alg. 1 and 2).

  Attributes:
    learners: M, the number of learners that the run is planned for. Ids from 0
      to M-1 are expected; the machines accept any id.
    fragments: P, the number of pieces of the model. P divides H.
    sync_every_steps: H, inner steps between two syncs of one fragment.
    overlap_steps: τ, inner steps that an exchange may overlap. With 0, a
      learner waits for the update of the round that it offered for.
    quorum: K, the number of offers that a round needs to close; 1 ≤ K ≤ M.
    grace_safety: γ < 1, the share of the slack that the grace window uses.
    grace_cap_steps: the longest grace window, in inner steps.
    admission: 'latest' merges the newest offer of every live learner; 'fresh'
      only offers of learners whose pace clock has reached the round.
    max_staleness_versions: offers on a base older than this are refused.
    weighting: 'tokens' weighs a contribution by quantity and quality of its
      tokens (Alg. 2, line 9); 'equal' gives every learner that trained the same
      weight.
    patience: factor on every time-out; all time-outs derive from measured step
      and transfer times (`timeouts.py`).
    total_steps: the run ends when the global step t reaches this.
    blend: how a learner takes in an update: 'overwrite', 'mix' or 'carry'.
  """

  learners: int
  fragments: int
  sync_every_steps: int
  overlap_steps: int
  quorum: int
  grace_safety: float
  grace_cap_steps: float
  admission: str
  max_staleness_versions: int
  weighting: str
  patience: float
  total_steps: int
  blend: str

  def __post_init__(self):
    broken = list(self._broken_rules())
    if broken:
      raise ValueError('protocol: ' + '; '.join(broken))

  @property
  def blending(self) -> Blending:
    """The traits of the blend that the machines act on."""
    return BLENDS[self.blend]

  @property
  def spacing_steps(self) -> int:
    """s = H / P, the number of inner steps between two rounds."""
    return self.sync_every_steps // self.fragments

  @property
  def inflight_max(self) -> int:
    """Rounds that a learner may be ahead of the last close: max(1, ⌈τ/s⌉)."""
    return max(1, math.ceil(self.overlap_steps / self.spacing_steps))

  @property
  def clock_ahead_max(self) -> int:
    """The most inner steps that a pace clock may be ahead of t."""
    return self.spacing_steps * self.inflight_max

  def fragment_of(self, round_: int) -> int:
    """The fragment of round r = 1, 2, …: cyclic, the same everywhere."""
    assert round_ >= 1, f'rounds start at 1: {round_=}'
    return (round_ - 1) % self.fragments

  def version_after(self, round_: int) -> int:
    """The version that `fragment_of(round_)` has once `round_` closed."""
    assert round_ >= 1, f'rounds start at 1: {round_=}'
    return (round_ - 1) // self.fragments + 1

  def versions_at(self, closed_round: int) -> tuple[int, ...]:
    """Versions of all fragments once rounds 1 … `closed_round` closed."""
    whole, rest = divmod(closed_round, self.fragments)
    return tuple(whole + (p < rest) for p in range(self.fragments))

  def _broken_rules(self):
    if self.learners < 1:
      yield f'learners={self.learners}, must be at least 1'
    if self.fragments < 1:
      yield f'fragments={self.fragments}, must be at least 1'
    if self.sync_every_steps < 1:
      yield f'sync_every_steps={self.sync_every_steps}, must be at least 1'
    if self.fragments >= 1 and self.sync_every_steps % self.fragments:
      yield (
        f'fragments={self.fragments} does not divide '
        f'sync_every_steps={self.sync_every_steps}; P must divide H'
      )
    if not 0 <= self.overlap_steps < max(self.sync_every_steps, 1):
      yield (
        f'overlap_steps={self.overlap_steps}, must be at least 0 and less '
        f'than sync_every_steps={self.sync_every_steps}'
      )
    if not 1 <= self.quorum <= max(self.learners, 1):
      yield (
        f'quorum={self.quorum}, must be between 1 and learners={self.learners}'
      )
    if not 0 <= self.grace_safety < 1:
      yield f'grace_safety={self.grace_safety}, must be in [0, 1)'
    if not 0 <= self.grace_cap_steps < math.inf:
      yield f'grace_cap_steps={self.grace_cap_steps}, must be finite and ≥ 0'
    if self.admission not in ADMISSIONS:
      yield f'admission={self.admission!r}, must be one of {tuple(ADMISSIONS)}'
    if self.max_staleness_versions < 0:
      yield (
        f'max_staleness_versions={self.max_staleness_versions}, must be ≥ 0'
      )
    if self.weighting not in WEIGHTS:
      yield f'weighting={self.weighting!r}, must be one of {tuple(WEIGHTS)}'
    if not 0 < self.patience < math.inf:
      yield f'patience={self.patience}, must be finite and > 0'
    if self.total_steps < 1:
      yield f'total_steps={self.total_steps}, must be at least 1'
    if self.blend not in BLENDS:
      yield f'blend={self.blend!r}, must be one of {tuple(BLENDS)}'
