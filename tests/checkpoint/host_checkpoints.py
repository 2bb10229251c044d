# SPDX-License-Identifier: Apache-2.0
"""Runs one host of a learner that saves its state, or restores it.

Run by `test_host_checkpoints.py`, with a task, the learner's folder, the number
of hosts, the index of this one and the coordinator. What a host has of the
state goes to a file, box by box, for the test to put together.
"""

import json
import os
import pathlib
import signal
import sys

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from diloco.checkpoint import arrays as checkpoint_arrays
from diloco.checkpoint import orbax_files
from diloco.checkpoint.learner_records import HeldState, LearnerRecords
from diloco.config import run_config
from diloco.learner import restore
from diloco.learner.hosts.process_group import HEARTBEAT_S
from diloco.learner.programs import LearnerPrograms
from diloco.protocol import host_messages
from diloco.run.payload_parts import boxes_of
from diloco.run.spec import make_run_spec
from experiments import tests_tiny

SAVE_S = 60.0
STEPS = (2, 3)
FINGERPRINTS = {'config': '1f'}


class Host:
  """One host of a learner with some state.

  Args:
    folder: of the checkpoints.
    hosts: N.
  """

  def __init__(self, folder: pathlib.Path, hosts: int):
    config = tests_tiny.get_config()
    config.model.update(d_model=48, heads=6, kv_heads=6, head_dim=8, d_ff=48)
    config.mesh.fsdp = len(jax.devices())
    config.data.batch = 12
    self.run_spec = make_run_spec(run_config.build(config))
    self.programs = LearnerPrograms(self.run_spec)
    self.records = LearnerRecords(folder, 0, FINGERPRINTS, 2, logging.warning)
    self.folder = folder
    self.hosts = hosts
    # The bases are of another draw than θ, which they are not at the start.
    whole = self.run_spec.initial_fragments()
    self.bases = {
      p: {
        name: x + np.float32(0.5)
        for name, x in boxes_of(self.programs.holding.needed[p], theta).items()
      }
      for p, theta in enumerate(whole)
    }
    self.theta = self.programs.init(self.run_spec.initial_parameters())

  def save(self, step: int) -> bool:
    """Trains to a step, and saves it."""
    params, state = self.theta
    rows = (
      self.run_spec.config.data.batch,
      self.run_spec.config.data.seq_len + 1,
    )
    tokens = np.random.default_rng(step).integers(0, 64, rows, np.int32)
    batch = self.programs.put_batch({'tokens': tokens})
    params, state, _ = self.programs.step(params, state, batch, 0.1, (0, step))
    self.theta = params, state
    fragments = len(self.bases)
    progress = {
      'process': 1,
      'rows': 41,
      'step': step,
      'tokens': 77,
      'versions': [3] * fragments,
      'crcs': [5] * fragments,
      'from_steps': [1] * fragments,
      'from_tokens': [9] * fragments,
      'closed_known': 6,
      'global_step': 8,
    }
    held = HeldState(params, state)
    bases = lambda: self.programs.bases_to_save(self.bases)  # noqa: E731
    assert self.records.save_state(step, held, bases, progress)
    return self.records.wait(SAVE_S) and not self.records.failed

  def restore(self) -> restore.RestoredState:
    source = None
    if self.hosts > 1:  # As `HostGroup.agree` does.
      source = host_messages.RestoreFrom(self.records.newest_step)
    return restore.restore(self.run_spec, self.programs, self.records, source)

  def write_boxes(self, name: str, params, state, bases):
    """Writes what this host has, box by box."""
    tree = {
      'params': params,
      'optimizer': state,
      'bases': self.programs.bases_to_save(dict(enumerate(bases))),
    }
    boxes = {
      f'{path}@{checkpoint_arrays.box_name(index, leaf.shape)}': np.asarray(x)
      for path, leaf in checkpoint_arrays.named(tree).items()
      for index, x, _ in checkpoint_arrays.boxes_of(leaf)
    }
    np.savez(self.folder.parent / f'{name}-{jax.process_index()}.npz', **boxes)


def forbid_collectives():
  """Lets what Orbax would call fail.

  A save runs beside steps, which use the devices in an order of their own.
  """

  def fail(*_, **__):
    raise AssertionError('a collective on the devices')

  for name in ('broadcast_one_to_all', 'process_allgather'):
    assert callable(getattr(multihost_utils, name))
    setattr(multihost_utils, name, fail)
  multihost_utils.sync_global_devices = fail


def save(host: Host):
  """Saves two steps."""
  saved = [host.save(step) for step in STEPS]
  host.write_boxes('saved', *host.theta, host.bases.values())
  print(json.dumps({'saved': saved}), flush=True)


def read(host: Host):
  """Restores the newest."""
  found = host.restore()
  bases = [held.theta for held in found.host.held()]
  host.write_boxes(
    f'restored-by-{host.hosts}', found.params, found.inner_state, bases
  )
  start = found.start
  print(
    json.dumps(
      {
        'step': start.step,
        'rows': start.rows,
        'versions': start.versions,
        'crcs': start.crcs,
        'kind': found.source.kind,
      }
    ),
    flush=True,
  )


def die(host: Host):
  """Saves a step; in the midst of the next save the last host is killed."""
  host.save(STEPS[0])
  if jax.process_index() == host.hosts - 1:

    async def end(self, directory):
      os.kill(os.getpid(), signal.SIGKILL)

    orbax_files._Crcs.save = end
  host.save(STEPS[1])


if __name__ == '__main__':
  task, folder, hosts, process, coordinator = sys.argv[1:]
  if int(hosts) > 1:
    jax.distributed.initialize(
      coordinator,
      int(hosts),
      int(process),
      heartbeat_timeout_seconds=HEARTBEAT_S,
    )
  forbid_collectives()
  host = Host(pathlib.Path(folder), int(hosts))
  {'save': save, 'read': read, 'die': die}[task](host)
