# SPDX-License-Identifier: Apache-2.0
"""Measures what memory a learner takes to draw, give and take over a state.

    python -m tests.learner.state_memory 40    # million parameters

Two processes, of which one gives its state to the other; each prints bytes a
parameter beyond its compiled programs, as JSON. Linux only.
"""

import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.learner import restore
from diloco.learner.hosts import host_transfer
from diloco.learner.programs import LearnerPrograms
from diloco.learner.train_state import SteppingState
from diloco.models import api
from diloco.protocol import host_messages, messages
from diloco.run.spec import make_run_spec
from diloco.transport.auth import OPEN
from diloco.transport.planes import make_plane
from tests.checkpoint.lone_learner import run_spec_of
from tests.waiting import until

TENSORS = 20
DEADLINE_S = 300.0
PLANE = 'jax_transfer'


def _model(millions: float) -> api.Model:
  """½·‖θ‖² of square tensors."""
  width = round((millions * 1e6 / TENSORS) ** 0.5)
  names = [f't{i}' for i in range(TENSORS)]

  def init(key):
    keys = jax.random.split(key, TENSORS)
    draw = jax.random.normal
    return {name: draw(k, (width, width)) for name, k in zip(names, keys)}

  def loss(params, batch, key):
    return sum(0.5 * jnp.sum(jnp.square(x)) for x in params.values()), {}

  axes = dict.fromkeys(names, (None, None))
  return api.Model(init, loss, axes=axes, roles=dict.fromkeys(names, 'plain'))


class Learner:
  """One learner, and what its process has in memory.

  Attributes:
    peaks: the largest resident bytes a parameter since the last, by name.
  """

  def __init__(self, folder: pathlib.Path, role: str, millions: float):
    self.folder = folder
    config = run_spec_of(0.01).config
    self.run_spec = make_run_spec(config, _model(millions))
    self.programs = LearnerPrograms(self.run_spec)
    self.plane = make_plane(PLANE, '127.0.0.1', OPEN)
    records = LearnerRecords(folder / role, 0, {}, 1, print)
    self.peaks: dict[str, float] = {}
    self._before = 0
    self._before = self.resident()
    restored = restore.restore(self.run_spec, self.programs, records)
    self.state = SteppingState(
      self.run_spec, 0, self.programs, restored, records
    )
    self.transfer = host_transfer.HostTransfer(
      self.run_spec, self.programs, restored.host, self.plane
    )
    self.fragments = len(self.run_spec.layout.fragments)

  def resident(self, key: str = 'VmRSS') -> float:
    """Returns bytes a parameter; freed memory does not count."""
    ctypes.CDLL('libc.so.6').malloc_trim(0)
    lines = pathlib.Path('/proc/self/status').read_text().splitlines()
    [line] = [x for x in lines if x.startswith(key)]
    return int(line.split()[1]) * 1024 / self.run_spec.parameters - self._before

  def note(self, name: str):
    self.peaks[name] = round(self.resident('VmHWM'), 1)
    pathlib.Path('/proc/self/clear_refs').write_text('5')

  def steps(self, count: int):
    """Makes steps, as a loop does."""
    state, data = self.state, self.run_spec.config.data
    rows = np.zeros((data.batch, data.seq_len + 1), np.int32)
    for i in range(count):
      batch = self.programs.put_batch({'tokens': rows})
      state.params, state.inner_state, metrics = state.holder.step(
        state.params, state.inner_state, batch, 0.01, (0, i)
      )
      jax.block_until_ready(metrics)


def give(learner: Learner):
  """Draws a state, trains, and gives it to the other process."""
  learner.state.perform(host_messages.DrawTheta())
  learner.note('draws')
  learner.state.holder.begin()
  learner.note('begins')
  learner.steps(3)
  learner.note('trains')
  steady = learner.resident()
  most = host_transfer.payloads_max(
    learner.run_spec, learner.programs.state_like, 1
  )
  order = host_messages.DonateAt(1, 4096, tuple(range(1, most + 1)), '')
  held = learner.state.perform(order)
  learner.steps(1)
  learner.note('steps beside what is held')
  replicas = learner.state.host.held()
  address, parts = learner.transfer.donate(order, replicas, held)
  told = address, [(each.nbytes, each.crc) for each in parts]
  crcs = learner.state.host.crcs()
  path = learner.folder / 'told'
  path.with_suffix('.part').write_text(json.dumps((*told, crcs)))
  path.with_suffix('.part').rename(path)
  until((learner.folder / 'taken').exists, DEADLINE_S, 'it is taken')
  learner.note('gives')
  learner.transfer.end_donations()
  return steady


def take(learner: Learner):
  """Takes over what the other process gives."""
  path = learner.folder / 'told'
  until(path.exists, DEADLINE_S, 'a state is offered')
  address, parts, crcs = json.loads(path.read_text())
  payloads = host_transfer.announced(
    range(1, len(parts) + 1),
    learner.run_spec.full.name,
    learner.fragments,
    [[messages.Part(*each) for each in parts]],
  )
  versions = (3,) * learner.fragments
  order = host_messages.HostFetch(1, (address,), payloads, '', versions, crcs)
  learner.transfer.fetch(order)
  learner.transfer.end_fetch(taken=True)
  (learner.folder / 'taken').touch()
  learner.note('fetches')
  inner_state = learner.transfer.take_adopted()
  learner.state.perform(host_messages.AdoptState(), inner_state)
  for p in range(learner.fragments):
    order = host_messages.ApplyFragment(p, 3, False, False, 0, ())
    arrived = learner.transfer.take_arrived(p, 3)
    learner.state.perform(order, arrived)
    jax.block_until_ready(learner.state.params)
  learner.note('adopts')
  learner.state.holder.begin()
  learner.note('begins')
  return learner.resident()


def main(folder: str, role: str, millions: str):
  learner = Learner(pathlib.Path(folder), role, float(millions))
  pathlib.Path('/proc/self/clear_refs').write_text('5')
  steady = {'give': give, 'take': take}[role](learner)
  print(json.dumps({role: round(steady, 1), **learner.peaks}), flush=True)
  learner.plane.close()


def measured(millions: float) -> list[dict[str, float]]:
  """Returns what the two processes print: the giving one's first."""
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, '-m', 'tests.learner.state_memory', folder]
    processes = [
      subprocess.Popen([*command, role, str(millions)], stdout=subprocess.PIPE)
      for role in ('give', 'take')
    ]
    lines = [each.communicate(timeout=2 * DEADLINE_S)[0] for each in processes]
  return [json.loads(line.splitlines()[-1]) for line in lines]


if __name__ == '__main__':
  if len(sys.argv) == 2:
    print(*measured(float(sys.argv[1])), sep='\n')
  else:
    main(*sys.argv[1:])
