# SPDX-License-Identifier: Apache-2.0
"""Deals the accelerators of this machine to the learners of a run."""

import dataclasses
import pathlib
from collections.abc import Mapping

from diloco.config import hardware
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import learner_name
from launch.chips.found import (
  ACCELERATORS,
  TPU,
  LocalDevices,
  has_plugin,
  local_devices,
)
from launch.program import Program

# By these a user says that several processes share a GPU.
SHARING = (*hardware.FRACTIONS, hardware.PREALLOCATE)


def to_be_dealt(
  config: RunConfig,
  asked: int | None,
  environment: Mapping[str, str],
  root: pathlib.Path,
) -> LocalDevices | None:
  """Returns what is dealt to learners; None: all processes see what there is.

  Args:
    asked: devices of each learner; 0: nothing is dealt; None: where JAX can use
      accelerators and there are several learners.
    environment: the launcher's.
    root: where `dev` and `sys` are looked through.

  Raises:
    ConfigError: they are asked for and not there, or config.mesh has others.
  """
  found = None if asked == 0 else local_devices(environment, root)
  if asked is None:
    learners = config.protocol.learners
    if found is None or learners == 1 or not has_plugin(found.platform):
      return None
    too_few = config.mesh.devices * learners > len(found.ids)
    shares = any(name in environment for name in SHARING)
    return None if too_few and shares and found.platform != TPU else found
  if asked and found is None:
    nodes = ', '.join(str(root / each.nodes) for each in ACCELERATORS)
    raise ConfigError(
      [
        f'--chips_per_learner={asked}: no accelerator is here, or '
        f'{hardware.PLATFORMS} or a variable such as CUDA_VISIBLE_DEVICES '
        f'hides it; looked for {nodes}'
      ]
    )
  if asked and asked != config.mesh.devices:
    raise ConfigError(
      [
        f'--chips_per_learner={asked}: config.mesh asks for '
        f'{config.mesh.devices}; such as --config.mesh.fsdp={asked}'
      ]
    )
  return found


def dealt(
  whole: Program,
  config: RunConfig,
  found: LocalDevices,
  environment: Mapping[str, str],
) -> Program:
  """Gives each learner as many accelerators as `config.mesh` has, in order.

  All other processes take the CPU, but for the last evaluation, which has
  those of learner 0: they are free by then. The same run is dealt the same
  accelerators again.

  Args:
    environment: the launcher's.

  Raises:
    ConfigError: there are too few, or no process can have so many of them.
  """
  each = config.mesh.devices
  learners = {learner_name(i) for i in range(config.protocol.learners)}
  if each * len(learners) > len(found.ids):
    raise ConfigError([_too_few(each, len(learners), found)])
  left = list(found.ids)
  roles = []
  for role in whole.roles:
    if role.name not in learners:
      cpu = (*role.environment, (hardware.PLATFORMS, hardware.CPU))
      roles.append(dataclasses.replace(role, environment=cpu))
      continue
    if role.hosts > 1 and found.platform == TPU:
      raise ConfigError(
        [
          f'--hosts: {role.name} has {role.hosts} processes, and on the TPU of '
          'one machine a learner is one process; give 1'
        ]
      )
    own = []
    for _ in range(role.hosts):
      ids, left = left[: each // role.hosts], left[each // role.hosts :]
      own.append(found.variables(ids, environment))
    roles.append(dataclasses.replace(role, own_environments=tuple(own)))
  (first,) = (role for role in roles if role.name == learner_name(0))
  evaluate = dataclasses.replace(
    whole.evaluate, own_environments=first.own_environments[:1]
  )
  return dataclasses.replace(
    whole, roles=tuple(roles), evaluate=evaluate, newcomer=None
  )


def _too_few(each: int, learners: int, found: LocalDevices) -> str:
  has = len(found.ids)
  text = (
    f'{learners} learners of {each} devices (config.mesh) need '
    f'{learners * each}, and this machine has {has} '
    f'({found.platform.visible}={",".join(found.ids)}); give fewer learners, '
    f'or {hardware.PLATFORMS}={hardware.CPU} for the CPU'
  )
  if fitting := has // learners:
    text += f', or a mesh such as --config.mesh.fsdp={fitting}'
  if found.platform != TPU:
    shares = ' or '.join((hardware.FRACTIONS[0], hardware.PREALLOCATE))
    text += f'; learners share GPUs with --chips_per_learner=0 and {shares}'
  return text


def chips_of(whole: Program, found: LocalDevices) -> str:
  """Returns a line on which learner has which accelerators."""
  name = found.platform.visible
  told = [
    f'{role.process(host)} {dict(own).get(name, "all")}'
    for role in whole.roles
    for host, own in enumerate(role.own_environments)
  ]
  taken = {
    each
    for role in whole.roles
    for own in role.own_environments
    for each in dict(own).get(name, ','.join(found.ids)).split(',')
  }
  left = [each for each in found.ids if each not in taken]
  rest = f'; not used {",".join(left)}' if left else ''
  return f'{name}: {"; ".join(told)}{rest}'
