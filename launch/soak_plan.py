# SPDX-License-Identifier: Apache-2.0
"""Which processes a soak kills, and when: a value, drawn from a seed."""

import dataclasses
import random
from collections.abc import Sequence

PAIR_SHARE = 0.2  # Of the strikes, two processes at once.
START_UP_SHARE = 0.3  # While the last ones killed start again.
START_UP_S = 5.0  # About what a process takes to be ready.
CALM_S = 1.5


@dataclasses.dataclass(frozen=True)
class Strike:
  """SIGKILL for one or two processes at one moment."""

  victims: tuple[str, ...]
  in_start_up: bool  # `delay_s` after the last victims were started again;
  delay_s: float  # or after everybody has been merged since the last strike.


def plan(kills: int, seed: int, roles: Sequence[str]) -> list[Strike]:
  """`kills` kills in all.

  The run has as many quarters as there are roles; in each, one role is spared,
  so that what it keeps of all those deaths can be seen in its memory.
  """
  rng = random.Random(seed)
  strikes, done = [], 0
  while done < kills:
    spared = roles[done * len(roles) // kills]
    mortal = [role for role in roles if role != spared]
    wants_pair = rng.random() < PAIR_SHARE
    many = 2 if wants_pair and kills - done >= 2 else 1
    in_start_up = rng.random() < START_UP_SHARE and done > 0
    strikes.append(
      Strike(
        tuple(sorted(rng.sample(mortal, min(many, len(mortal))))),
        in_start_up,
        rng.uniform(0.0, START_UP_S if in_start_up else CALM_S),
      )
    )
    done += len(strikes[-1].victims)
  return strikes
