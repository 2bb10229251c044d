# SPDX-License-Identifier: Apache-2.0
"""Restores what one host starts from, if the learner has several.

All hosts restore the newest step of which each has a complete checkpoint;
without one, all start from the seed.
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
  """One host's state at the first boundary.

  Attributes:
    params: θ, on the devices.
    inner_state: state of the inner optimizer, on the devices.
    copy: this host's part of Θ, which holds the bases of θ.
    progress: the learner's progress; None: it starts from its seed.
  """

  params: Params
  inner_state: object
  copy: PartCopy
  progress: LearnerProgress | None


class CheckpointGone(Exception):
  """A checkpoint that this host reported cannot be read; the learner
  restarts.
  """


def common_step(by_host: Iterable[Iterable[int]]) -> int:
  """Returns the newest step that all hosts have; `NONE` if there is none."""
  return max(set.intersection(*map(set, by_host)), default=NONE)


def begin_part(
  blueprint: Blueprint, device: Device, records: LearnerRecords, step: int
) -> PartBeginning:
  """Restores this host's part of the checkpoint of `step`, or of the seed.

  Raises:
    BrokenRecord: the folder belongs to another learner or run.
    CheckpointGone: the checkpoint can't be read.
  """
  holding = device.holding
  cuts = Cuts(blueprint.owners, device.partition)
  # Computed whole once, so that each host knows the initial CRCs by itself.
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
