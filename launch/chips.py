# SPDX-License-Identifier: Apache-2.0
"""The accelerators of this machine, and which process of a run gets which.

Imports no jax, which would open them.
"""

import dataclasses
import importlib.util
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

from diloco.config import hardware, unlike
from diloco.config.hardware import CPU, PLATFORMS, V5E, V5P, V6E, Chip
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import learner_name
from launch import variables
from launch.program import Program

# Facts about libtpu are from JAX's own harness of several processes on one
# machine (jax/_src/test_multiprocess.py) and from reports of others; none of
# them was tried here.

GOOGLE = '0x1ae0'  # PCI's number of a vendor.
PCI_DEVICES = {'0x0062': V5P, '0x0063': V5E, '0x006f': V6E}
CHIP_BOUNDS = 'TPU_CHIPS_PER_PROCESS_BOUNDS'
# What libtpu gives one of several processes, and how these chips lie. A pair
# lies the other way on v5e, where '1,2,1' ends in 'Mesh build failed'.
BOUNDS = {1: '1,1,1', 2: '1,2,1', 4: '2,2,1'}
V5E_BOUNDS = {**BOUNDS, 2: '2,1,1'}
# By these a user says that several processes share a GPU.
SHARING = (*hardware.FRACTIONS, hardware.PREALLOCATE)
TPU_PORT = 8476  # libtpu's; that of a process is as far above as its first id.


@dataclasses.dataclass(frozen=True)
class Platform:
  """A kind of accelerator."""

  names: tuple[str, ...]  # By which JAX_PLATFORMS asks for it.
  visible: str  # The variable that says which of them a process sees.
  plugin: str  # A pattern of the module by which JAX uses it.
  nodes: str  # The files that stand for them, below the root.


TPU = Platform(('tpu',), 'TPU_VISIBLE_CHIPS', 'libtpu', 'dev/{accel,vfio/}*')
CUDA = Platform(
  ('cuda', 'gpu'), 'CUDA_VISIBLE_DEVICES', 'xla_cuda*', 'dev/nvidia*'
)
ROCM = Platform(
  ('rocm', 'gpu'), 'ROCR_VISIBLE_DEVICES', 'xla_rocm*', 'dev/dri/renderD*'
)
ACCELERATORS = (TPU, CUDA, ROCM)


@dataclasses.dataclass(frozen=True)
class LocalDevices:
  """The accelerators of this machine.

  Attributes:
    ids: by which a process is told what it sees; neighbours side by side.
    chip: None where it is not known here.
  """

  platform: Platform
  ids: tuple[str, ...]
  chip: Chip | None = None

  def variables(
    self, ids: Sequence[str], environment: Mapping[str, str]
  ) -> tuple[tuple[str, str], ...]:
    """Returns what lets a process see these, and no others.

    Args:
      ids: empty: it sees all.
      environment: the launcher's; bounds that it has are taken.

    Raises:
      ConfigError: libtpu does not give a process so many chips.
    """
    if tuple(ids) == self.ids:
      return ()
    if self.platform != TPU:
      return ((self.platform.visible, ','.join(ids)),)
    port = TPU_PORT + int(ids[0])
    # The process is a slice by itself: one process, which is number 0.
    return (
      (TPU.visible, ','.join(ids)),
      (CHIP_BOUNDS, self._bounds(len(ids), environment.get(CHIP_BOUNDS))),
      ('TPU_PROCESS_BOUNDS', '1,1,1'),
      ('TPU_PROCESS_ADDRESSES', f'localhost:{port}'),
      ('TPU_PROCESS_PORT', str(port)),
      ('CLOUD_TPU_TASK_ID', '0'),
      ('ALLOW_MULTIPLE_LIBTPU_LOAD', '1'),
    )

  def _bounds(self, chips: int, bounds: str | None) -> str:
    if bounds:
      if re.fullmatch(r'\d+,\d+,\d+', bounds) and chips == math.prod(
        map(int, bounds.split(','))
      ):
        return bounds
      raise ConfigError(
        [
          f'{CHIP_BOUNDS}={bounds}: must be three numbers like 1,2,1 with the '
          f'product {chips}, the chips of a process; or not set'
        ]
      )
    known = V5E_BOUNDS if self.chip == V5E else BOUNDS
    if chips not in known:
      raise ConfigError(
        [
          f'{chips} chips for a process: libtpu gives it 1, 2 or 4 of them, '
          f'or all {len(self.ids)} of the machine'
        ]
      )
    return known[chips]


def local_devices(
  environment: Mapping[str, str], root: pathlib.Path
) -> LocalDevices | None:
  """Returns the accelerators of this machine that JAX would be asked for.

  Args:
    environment: says which are visible, and which platforms are asked for.
    root: where `dev` and `sys` are looked through.

  Raises:
    ConfigError: TPU_VISIBLE_CHIPS is no list of numbers.
  """
  asked = [name for name in environment.get(PLATFORMS, '').split(',') if name]
  if asked[:1] == [CPU]:
    return None
  for platform in ACCELERATORS:
    if asked and not set(asked) & set(platform.names):
      continue
    named = environment.get(platform.visible)
    ids = _nodes(platform, root) if named is None else _listed(platform, named)
    if ids:
      chip = _tpu_chip(root) if platform == TPU else None
      return LocalDevices(platform, ids, chip)
  return None


def has_plugin(platform: Platform) -> bool:
  """Returns True if JAX could use it: otherwise it takes the CPU."""
  if platform == TPU:
    return importlib.util.find_spec(TPU.plugin) is not None
  spec = importlib.util.find_spec('jax_plugins')
  folders = spec.submodule_search_locations if spec else ()
  return any(
    next(pathlib.Path(folder).glob(platform.plugin), None) for folder in folders
  )


def _listed(platform: Platform, value: str) -> tuple[str, ...]:
  """Ids in a variable; the first that can be none hides what follows."""
  ids = []
  for word in value.split(','):
    if word.strip() in ('', '-1', 'NoDevFiles'):
      break
    ids.append(word.strip())
  if platform == TPU and not all(word.isdecimal() for word in ids):
    raise ConfigError([f'{TPU.visible}={value}: must be numbers such as 0,1'])
  return tuple(ids)


def _nodes(platform: Platform, root: pathlib.Path) -> tuple[str, ...]:
  """Ids of what the machine has; CUDA numbers GPUs from 0 in any container."""
  dev = root / 'dev'
  if platform == TPU:
    return _numbered(dev, 'accel') or _vfio(dev / 'vfio', root)
  if platform == CUDA:
    count = len(_numbered(dev, 'nvidia'))
  else:
    count = len(_numbered(dev / 'dri', 'renderD')) * (dev / 'kfd').exists()
  return tuple(map(str, range(count)))


def _numbered(folder: pathlib.Path, name: str) -> tuple[str, ...]:
  """Numbers of the files called `name` and a number, in order."""
  numbers = (path.name.removeprefix(name) for path in folder.glob(f'{name}*'))
  return tuple(sorted((n for n in numbers if n.isdecimal()), key=int))


def _vfio(folder: pathlib.Path, root: pathlib.Path) -> tuple[str, ...]:
  """IOMMU groups of TPU chips, by their PCI addresses.

  The kernel numbers groups as it likes; the addresses follow the board.
  """
  groups = []
  for number in _numbered(folder, ''):
    group = root / 'sys/kernel/iommu_groups' / number / 'devices'
    chips = sorted(group.glob('*'))
    vendors = {_read(chip / 'vendor') for chip in chips} - {''}
    if not vendors or GOOGLE in vendors:
      groups.append((chips[0].name if chips else '', number))
  return tuple(number for _, number in sorted(groups, key=lambda pair: pair[0]))


def _tpu_chip(root: pathlib.Path) -> Chip | None:
  for device in sorted((root / 'sys/bus/pci/devices').glob('*')):
    known = PCI_DEVICES.get(_read(device / 'device'))
    if known and _read(device / 'vendor') == GOOGLE:
      return known
  return None


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text().strip()
  except OSError:
    return ''


def _shares(config: RunConfig) -> list[int]:
  """Returns the devices of each learner."""
  setups = unlike.setups(config, config.protocol.learners)
  return [each.config.mesh.devices for each in setups]


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
  devices = None if asked == 0 else local_devices(environment, root)
  if asked is None:
    learners = config.protocol.learners
    if devices is None or learners == 1 or not has_plugin(devices.platform):
      return None
    too_few = sum(_shares(config)) > len(devices.ids)
    shares = any(name in environment for name in SHARING)
    return None if too_few and shares and devices.platform != TPU else devices
  if asked and devices is None:
    nodes = ', '.join(str(root / kind.nodes) for kind in ACCELERATORS)
    raise ConfigError(
      [
        f'--chips_per_learner={asked}: no accelerator is here, or '
        f'{PLATFORMS} or a variable such as CUDA_VISIBLE_DEVICES '
        f'hides it; looked for {nodes}'
      ]
    )
  for learner, share in enumerate(_shares(config) if asked else ()):
    if asked != share:
      raise ConfigError(
        [
          f'--chips_per_learner={asked}: config.mesh of learner {learner} asks '
          f'for {share}; such as --config.mesh.fsdp={asked}'
        ]
      )
  return devices


def dealt(
  whole: Program,
  config: RunConfig,
  devices: LocalDevices,
  environment: Mapping[str, str],
) -> Program:
  """Gives each learner as many accelerators as its mesh has, in order.

  All other processes take the CPU, but for the last evaluation, which has
  those of learner 0: they are free by then. The same run is dealt the same
  accelerators again.

  Args:
    environment: the launcher's.

  Raises:
    ConfigError: there are too few, or no process can have so many of them.
  """
  shares = _shares(config)
  if sum(shares) > len(devices.ids):
    raise ConfigError([_too_few(shares, devices)])
  left, ids, roles = devices.ids, {}, []
  # The largest first: what lies together stays together.
  for i, share in sorted(enumerate(shares), key=lambda each: -each[1]):
    ids[learner_name(i)], left = left[:share], left[share:]
  for role in whole.roles:
    if role.name not in ids:
      cpu = (*role.environment, (PLATFORMS, CPU))
      roles.append(dataclasses.replace(role, environment=cpu))
      continue
    if role.hosts > 1 and devices.platform == TPU:
      raise ConfigError(
        [
          f'--hosts: {role.name} has {role.hosts} processes, and on the TPU of '
          'one machine a learner is one process; give 1'
        ]
      )
    mine = ids[role.name]
    each = len(mine) // role.hosts
    own = tuple(
      devices.variables(mine[i : i + each], environment)
      for i in range(0, len(mine), each)
    )
    roles.append(dataclasses.replace(role, own_environments=own))
    if len(mine) > 1:
      kind = variables.TPU if devices.platform == TPU else variables.GPU
      flags = variables.on(kind, role.environment, environment)
      roles[-1] = dataclasses.replace(roles[-1], environment=flags)
  (first,) = (role for role in roles if role.name == learner_name(0))
  evaluate = dataclasses.replace(
    whole.evaluate, own_environments=first.own_environments[:1]
  )
  return dataclasses.replace(whole, roles=tuple(roles), evaluate=evaluate)


def _too_few(shares: Sequence[int], devices: LocalDevices) -> str:
  has, learners = len(devices.ids), len(shares)
  sizes = ' + '.join(map(str, shares)) if len({*shares}) > 1 else shares[0]
  text = (
    f'{learners} learners of {sizes} devices (config.mesh) need '
    f'{sum(shares)}, and this machine has {has} '
    f'({devices.platform.visible}={",".join(devices.ids)}); give fewer '
    f'learners, or {PLATFORMS}={CPU} for the CPU'
  )
  if fitting := has // learners:
    text += f', or a mesh such as --config.mesh.fsdp={fitting}'
  if devices.platform != TPU:
    shares = ' or '.join((hardware.FRACTIONS[0], hardware.PREALLOCATE))
    text += f'; learners share GPUs with --chips_per_learner=0 and {shares}'
  return text


def chips_of(whole: Program, devices: LocalDevices) -> str:
  """Returns a line on which learner has which accelerators."""
  name = devices.platform.visible
  assigned = [
    f'{role.process(host)} {dict(own).get(name, "all")}'
    for role in whole.roles
    for host, own in enumerate(role.own_environments)
  ]
  taken = {
    each
    for role in whole.roles
    for own in role.own_environments
    for each in dict(own).get(name, ','.join(devices.ids)).split(',')
  }
  left = [each for each in devices.ids if each not in taken]
  rest = f'; not used {",".join(left)}' if left else ''
  return f'{name}: {"; ".join(assigned)}{rest}'
