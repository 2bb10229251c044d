# SPDX-License-Identifier: Apache-2.0
"""The rules by name that say if a round has enough offers to merge."""

from typing import NamedTuple


class Standing(NamedTuple):
  """What a rule of quorum knows of a round."""

  offers: int  # That it can merge.
  live: int  # Learners that are here to stay.
  quorum: int  # K, at most the learners that can be pulled from.


class Verdict(NamedTuple):
  """A decision and its reason."""

  holds: bool
  reason: str


def count_offers(standing: Standing) -> Verdict:
  """K offers suffice (the paper's Alg. 2)."""
  offers, live, quorum = standing
  return Verdict(offers >= quorum, f'{offers}/{quorum} offers, {live} live')


QUORUM_RULES = {'offers': count_offers}
