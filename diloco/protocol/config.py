# SPDX-License-Identifier: Apache-2.0
"""Holds the protocol's constants for one run, checked at construction."""

import math
from collections.abc import Mapping

from diloco.protocol.round_policy import ADMISSIONS, QUORUM_RULES, WEIGHTS
from diloco.protocol.values import Value

# Encoded updates of a fragment that stay on offer to a session, the newest: as
# many bytes as the full fragment at 4 bits, so that more would not pay.
UPDATES_KEPT = 8


class Blending(Value):
  """The traits of a blend that the machines act on.

  `numerics.blend` computes the blend itself.
  """

  interpolates: bool = False  # It leaves a share α of θ next to Θ_p.
  rebases: bool = False  # Progress made since the merged copy stays in θ.


BLENDS = {
  'replace': Blending(),
  'interpolate': Blending(interpolates=True),
  'rebase': Blending(rebases=True),
}
# Of a rule of the user's own: of progress since the copy it may keep what it
# likes, and of what θ was before it keeps nothing.
OWN_BLENDING = Blending(rebases=True)
# What 0.1.0 called them: its recorded runs and checkpoints are read on.
OLD_BLENDS = {'overwrite': 'replace', 'mix': 'interpolate', 'carry': 'rebase'}
BLEND = 'protocol.blend'


def names_own(value: str) -> bool:
  """True if a value is the 'package.module:function' of the user's own."""
  module, _, name = value.partition(':')
  words = (*module.split('.'), name)
  return all(word.isascii() and word.isidentifier() for word in words)


def blending_of(blend: str) -> Blending:
  """Returns the traits of a valid `ProtocolConfig.blend`."""
  return OWN_BLENDING if names_own(blend) else BLENDS[blend]


def with_current_blend(recorded: Mapping, key: str = 'blend') -> dict:
  """Returns what a run recorded with the name that its blend has now.

  Args:
    key: of the blend; BLEND in fingerprints, where its value is JSON.
  """
  quoted = {f'"{old}"': f'"{now}"' for old, now in OLD_BLENDS.items()}
  now = {**OLD_BLENDS, **quoted}.get(str(recorded.get(key)))
  return {**recorded, key: now} if now else dict(recorded)


# Where a learner that is behind the run takes the inner state: from a live
# peer, from the newest checkpoint of one, or from that where no peer lives.
PEER, CHECKPOINT, AUTO = BOOTSTRAPS = 'peer', 'checkpoint', 'auto'


class ProtocolConfig(Value):
  """Settings that syncer and learners share (the paper's Alg. 1 and 2).

  The section `protocol` of a configuration: a key stands here, with its type,
  default, meaning and rule, and nowhere else.
  """

  learners: int = 2  # M, for which the run is planned; ids from 0 to M - 1.
  fragments: int = 8  # P, the pieces of the model; divides H.
  sync_every_steps: int = 24  # H, inner steps between two syncs of a fragment.
  # τ, inner steps that an exchange may overlap; 0: a learner waits for the
  # update of the round that it offered for.
  overlap_steps: int = 6
  quorum: int = 1  # K, offers without which no round closes; 0: all, K = M.
  quorum_rule: str = 'offers'  # What makes a quorum: a key of QUORUM_RULES.
  grace_safety: float = 0.8  # γ, the share of the slack that grace uses.
  grace_cap_steps: float = 2.0  # The longest grace window, in inner steps.
  admission: str = 'latest'  # Which offers a round takes: a key of ADMISSIONS.
  max_staleness_versions: int = 4  # Offers on an older base are refused.
  weighting: str = 'tokens'  # Of what is merged; a key of WEIGHTS.
  patience: float = 1.0  # Stretches all time-outs; they are measured.
  total_steps: int = 500  # The run ends at this global step.
  # How a learner takes an update in: a key of BLENDS, or the
  # 'package.module:function' of a rule of your own.
  blend: str = 'rebase'
  blend_alpha: float = 0.0  # α of 'interpolate': the weight of θ.

  def __post_init__(self):
    if broken := '; '.join(self._broken_rules()):
      raise ValueError(f'protocol: {broken}')

  @property
  def blending(self) -> Blending:
    """The traits of the blend that the machines act on."""
    return blending_of(self.blend)

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

  def versions_at(self, closed_round: int) -> tuple[int, ...]:
    """Versions of all fragments once rounds 1 … `closed_round` closed."""
    whole, rest = divmod(closed_round, self.fragments)
    return tuple(whole + (p < rest) for p in range(self.fragments))

  def _broken_rules(self):
    """Yields, for each key that breaks its rule, the value and the rule."""
    rules = (
      ('learners', self.learners >= 1, 'at least 1'),
      ('fragments', self.fragments >= 1, 'at least 1'),
      ('sync_every_steps', self.sync_every_steps >= 1, 'at least 1'),
      (
        'overlap_steps',
        0 <= self.overlap_steps < max(self.sync_every_steps, 1),
        f'at least 0 and less than sync_every_steps={self.sync_every_steps}',
      ),
      (
        'quorum',
        1 <= self.quorum <= max(self.learners, 1),
        f'between 1 and learners={self.learners}',
      ),
      _one_of('quorum_rule', self.quorum_rule, QUORUM_RULES),
      ('grace_safety', 0 <= self.grace_safety < 1, 'in [0, 1)'),
      (
        'grace_cap_steps',
        0 <= self.grace_cap_steps < math.inf,
        'finite and ≥ 0',
      ),
      _one_of('admission', self.admission, ADMISSIONS),
      ('max_staleness_versions', self.max_staleness_versions >= 0, '≥ 0'),
      _one_of('weighting', self.weighting, WEIGHTS),
      ('patience', 0 < self.patience < math.inf, 'finite and > 0'),
      ('total_steps', self.total_steps >= 1, 'at least 1'),
      (
        'blend',
        self.blend in BLENDS or names_own(self.blend),
        f"one of {tuple(BLENDS)}, or the 'package.module:function' of a rule "
        'of your own',
      ),
      (
        'blend_alpha',
        not self.blend_alpha
        or names_own(self.blend)
        or BLENDS.get(self.blend, Blending(interpolates=True)).interpolates,
        f'0, blend={self.blend!r} takes none',
      ),
      ('blend_alpha', 0 <= self.blend_alpha <= 1, 'in [0, 1]'),
    )
    for name, holds, rule in rules:
      if not holds:
        yield f'{name}={getattr(self, name)!r}, must be {rule}'
    if self.fragments >= 1 and self.sync_every_steps % self.fragments:
      yield (
        f'fragments={self.fragments} does not divide '
        f'sync_every_steps={self.sync_every_steps}; P must divide H'
      )


def _one_of(name: str, value: str, choices: Mapping) -> tuple[str, bool, str]:
  return name, value in choices, f'one of {tuple(choices)}'
