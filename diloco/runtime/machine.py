# SPDX-License-Identifier: Apache-2.0
"""What of the machine decides about the bits of an inner step.

Measured on 2 cores, 20 steps of the quickstart's model: with NPROC=1 other
bits than with 2, with 4 the same as with 2; so the tape has the number.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping

import jax

from diloco.config_values import MeshConfig
from diloco.runtime.tape_lines import Machine

THREADS = 'NPROC'  # XLA's CPU client sizes its pools by it.
XLA_FLAGS = 'XLA_FLAGS'


def describe(mesh: MeshConfig, environment: Mapping[str, str]) -> Machine:
  """This process's; initialises its devices.

  Args:
    mesh: of the learner.
    environment: of the process.
  """
  device = jax.local_devices()[0]
  threads = environment.get(THREADS, '')
  return Machine(
    jax=jax.__version__,
    platform=device.platform,
    kind=device.device_kind,
    fsdp=mesh.fsdp,
    tensor=mesh.tensor,
    cores=os.cpu_count() or 1,
    threads=int(threads) if threads.isdecimal() else 0,
    xla_flags=environment.get(XLA_FLAGS, ''),
    expert=mesh.expert,
    hosts=jax.process_count(),
  )


def environment_like(machine: Machine) -> dict[str, str]:
  """What a process has to have set, before it asks for a device, to be so."""
  variables = {XLA_FLAGS: machine.xla_flags}
  if machine.threads:
    variables[THREADS] = str(machine.threads)
  return variables


def differences(here: Machine, there: Machine) -> Iterator[str]:
  """What may make the bits of `here` others than those of `there`."""
  for field in dataclasses.fields(Machine):
    if field.name == 'cores' and here.threads and there.threads:
      continue  # Then their number decides nothing.
    mine, theirs = getattr(here, field.name), getattr(there, field.name)
    if mine != theirs:
      yield f'{field.name}: {mine!r} here, {theirs!r} in the run'
