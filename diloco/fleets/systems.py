# SPDX-License-Identifier: Apache-2.0
"""The systems that a study compares, and how they recover, by name."""

import dataclasses
from collections.abc import Callable

from diloco.fleets import closed_forms, failures


@dataclasses.dataclass(frozen=True)
class Recovery:
  """A rule for what a group of slices does when it loses one.

  Attributes:
    stops: stops of a learner, from its interruptions, the pause of a
      reconfiguration, and the end of the run; as `failures.elastic`.
    goodput: g by closed form, from λ, the mean repair, and the pause.
    note: the paragraph of a report.
    runs_on: True if it runs on without the slice.
    dies: True if a stop is a death, and the next process bootstraps.
  """

  stops: Callable[..., tuple[failures.Stall, ...]]
  goodput: Callable[[float, float, float], float]
  note: str
  runs_on: bool = True
  dies: bool = False


def _elastic_goodput(rate_per_s: float, repair_s: float, pause_s: float):
  del repair_s
  return closed_forms.elastic_goodput(rate_per_s, pause_s)


def _waiting_goodput(rate_per_s: float, repair_s: float, pause_s: float):
  return closed_forms.waiting_goodput(rate_per_s, repair_s + pause_s)


RECOVERIES = {
  'elastic': Recovery(
    failures.elastic,
    _elastic_goodput,
    'A learner that loses a slice pauses, runs on without it, and pauses '
    'again when it is back. Data-parallel without elasticity waits for it.',
  ),
  'wait': Recovery(
    failures.waiting,
    _waiting_goodput,
    'A learner that loses a slice waits for it.',
    runs_on=False,
  ),
  'restart': Recovery(
    failures.elastic,
    _elastic_goodput,
    'A learner that loses a slice, or gets it back, starts again; its process '
    'bootstraps through a peer. The closed form is without the bootstrap. '
    'Data-parallel without elasticity waits for the slice.',
    dies=True,
  ),
}


@dataclasses.dataclass(frozen=True)
class FleetSystem:
  """A way to train on a fleet.

  Attributes:
    recovery: a key of `RECOVERIES`; None: as configured.
    is_diloco: True if its groups exchange once in H steps; False: it is one
      group, which exchanges after each.
    is_decoupled: True if no group waits for another: the protocol's machines.
    streams: True if groups in lock-step exchange fragment by fragment.
  """

  recovery: str | None = None
  is_diloco: bool = True
  is_decoupled: bool = False
  streams: bool = False


# Two that a report compares in a table of their own.
ELASTIC = 'elastic data-parallel'
DECOUPLED = 'Decoupled DiLoCo'

SYSTEMS = {
  'data-parallel': FleetSystem('wait', is_diloco=False),
  ELASTIC: FleetSystem('elastic', is_diloco=False),
  'synchronous DiLoCo': FleetSystem(),
  'streaming DiLoCo': FleetSystem(streams=True),
  DECOUPLED: FleetSystem(is_decoupled=True),
}
