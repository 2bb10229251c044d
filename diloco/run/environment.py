# SPDX-License-Identifier: Apache-2.0
"""Describes what, of machine and process, affects the bits of an inner step.

Measured on 2 cores with 20 steps of the quickstart's model: NPROC=1 gives other
bits than 2, and 4 the same as 2; so the event log includes that number. Another
model of processor gave other bits, too, with the same instructions: how a
product is summed depends on the sizes of the caches.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping

import jax

from diloco.config.run_config import RunConfig
from diloco.run.event_log import Machine

THREADS = 'NPROC'  # XLA's CPU client sizes its thread pools by it.
XLA_FLAGS = 'XLA_FLAGS'
# Lines of /proc/cpuinfo that tell processors of other bits apart.
PROCESSOR = ('model name', 'cpu family', 'model', 'stepping', 'cache size')


def describe(config: RunConfig, environment: Mapping[str, str]) -> Machine:
  """Describes this process; initialises its devices."""
  mesh = config.mesh
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
    context=mesh.context,
    hosts=jax.process_count(),
    processor=_processor() if device.platform == 'cpu' else '',
    batch=config.data.batch,
    accumulate=config.inner.accumulate,
    slices=mesh.slices,
  )


def _processor() -> str:
  """Returns model and cache of the processor; '' where Linux does not say."""
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    return ''
  first = [line.partition(':') for line in text.split('\n\n')[0].splitlines()]
  facts = {name.strip(): value.strip() for name, _, value in first}
  return ', '.join(
    f'{name} {facts[name]}' for name in PROCESSOR if name in facts
  )


def environment_like(machine: Machine) -> dict[str, str]:
  """Returns the environment that makes a process equal to `machine`.

  It must be set before the process asks for a device.
  """
  variables = {XLA_FLAGS: machine.xla_flags}
  if machine.threads:
    variables[THREADS] = str(machine.threads)
  return variables


def config_like(config: RunConfig, machine: Machine) -> RunConfig:
  """Returns the run's configuration as a learner on `machine` had it."""
  replace = dataclasses.replace
  return replace(
    config,
    data=replace(config.data, batch=machine.batch or config.data.batch),
    inner=replace(config.inner, accumulate=machine.accumulate),
    mesh=replace(
      config.mesh,
      fsdp=machine.fsdp,
      expert=machine.expert,
      context=machine.context,
      tensor=machine.tensor,
      slices=machine.slices,
    ),
  )


def differences(here: Machine, there: Machine) -> Iterator[str]:
  """Yields what may make the bits of `here` differ from those of `there`."""
  for field in dataclasses.fields(Machine):
    if field.name == 'cores' and here.threads and there.threads:
      continue  # Then the number of cores has no effect.
    mine, theirs = getattr(here, field.name), getattr(there, field.name)
    if mine != theirs:
      yield f'{field.name}: {mine!r} here, {theirs!r} in the run'
