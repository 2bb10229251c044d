# SPDX-License-Identifier: Apache-2.0
"""What one host of a learner begins with, where the learner has several.

All go on from the same step: the newest of which each has a whole checkpoint;
where there is none, all begin with the seed.
"""

import dataclasses
from collections.abc import Iterable

from absl import logging

from diloco.checkpoint.learner_records import LearnerProgress, LearnerRecords
from diloco.numerics import payload
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.cuts import Cuts
from diloco.runtime.device import Device, Params
from diloco.runtime.host_copy import Held
from diloco.runtime.part_copy import PartCopy

NONE = -1  # No checkpoint.


@dataclasses.dataclass(frozen=True)
class PartBeginning:
  """Everything that belongs together at the first boundary, of one host.

  Attributes:
    params: θ, on the devices.
    inner_state: of the inner optimizer, on the devices.
    copy: this host's part of Θ: θ's bases.
    progress: of the learner; None: it begins with its seed.
  """

  params: Params
  inner_state: object
  copy: PartCopy
  progress: LearnerProgress | None


class CheckpointGone(Exception):
  """What this host said it had, it can't read; the learner begins again."""


def common_step(by_host: Iterable[Iterable[int]]) -> int:
  """The newest that all hosts have; `NONE` if there is none."""
  return max(set.intersection(*map(set, by_host)), default=NONE)


def begin_part(
  blueprint: Blueprint, device: Device, records: LearnerRecords, step: int
) -> PartBeginning:
  """This host's part of the checkpoint of `step`, or of the seed.

  Raises:
    BrokenRecord: the folder is another learner's, or another run's.
    CheckpointGone: the checkpoint can't be read.
  """
  holding = device.holding
  cuts = Cuts(blueprint.owners, device.partition)
  # In whole, and once: what CRCs all begin with, each host knows by itself.
  whole = blueprint.initial_fragments()
  bases = {p: holding.needed_of(p, theta) for p, theta in enumerate(whole)}
  if step == NONE:
    layout = blueprint.layout.fragments
    held = [
      Held(0, bases[p], payload.crc(theta, layout[p]))
      for p, theta in enumerate(whole)
    ]
    params, state = device.init(blueprint.initial_parameters())
    copy = PartCopy(blueprint, cuts, holding.host, held)
    return PartBeginning(params, state, copy, None)
  found = records.restore(device.params_like, device.state_like, bases, step)
  if found is None:
    raise CheckpointGone(f'the checkpoint of step {step} can not be read')
  progress = found.progress
  logging.info('goes on from %s', found.path)
  held = [
    Held(version, found.bases[p], crc)
    for p, (version, crc) in enumerate(zip(progress.versions, progress.crcs))
  ]
  copy = PartCopy(blueprint, cuts, holding.host, held)
  return PartBeginning(found.params, found.inner_state, copy, progress)
