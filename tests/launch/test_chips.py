# SPDX-License-Identifier: Apache-2.0
"""Checks which accelerators of a machine the processes of a run see."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from diloco.config.hardware import V5E, V6E
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import Workdir
from launch.chips import (
  CUDA,
  ROCM,
  TPU,
  LocalDevices,
  chips_of,
  dealt,
  local_devices,
  to_be_dealt,
)
from launch.program import Processes, program
from launch.supervisor import Supervisor
from tests.backends.launch_values import a_config
from tests.waiting import until

pytestmark = pytest.mark.beside

DEADLINE_S = 240.0
FLAG = '--config=experiments/tests_tiny.py'
# A v5e-8 whose IOMMU groups are not in the order of its chips.
SHUFFLED = {
  '0000:00:0c.0': '3', '0000:00:0d.0': '2', '0000:00:0e.0': '4',
  '0000:00:0f.0': '7', '0000:80:00.0': '1', '0000:80:01.0': '5',
  '0000:80:02.0': '6', '0000:80:03.0': '0',
}  # fmt: skip
TPUS = LocalDevices(TPU, tuple('01234567'), V5E)
MANY = LocalDevices(TPU, tuple(map(str, range(16))))
GPUS = LocalDevices(CUDA, tuple('01234567'))
# Prints its environment, and stays.
TELL = """
import json, os, time
print(json.dumps(dict(os.environ)), flush=True)
time.sleep(600)
"""


def _nodes(root: pathlib.Path, *names: str) -> pathlib.Path:
  for name in names:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()
  return root


def _v5e_8(root: pathlib.Path) -> pathlib.Path:
  _nodes(root, 'dev/vfio/vfio', 'dev/vfio/9')
  for address, group in {**SHUFFLED, '0000:05:00.0': '9'}.items():
    _nodes(root, f'dev/vfio/{group}')
    tpu = group != '9'  # The other is a network card, say.
    for place in (
      f'sys/kernel/iommu_groups/{group}/devices/{address}',
      f'sys/bus/pci/devices/{address}',
    ):
      _nodes(root, f'{place}/vendor', f'{place}/device')
      (root / place / 'vendor').write_text('0x1ae0\n' if tpu else '0x8086\n')
      (root / place / 'device').write_text('0x0063\n' if tpu else '0x1572\n')
  return root


def _program(devices: int, learners: int, hosts: int = 1):
  config = a_config(devices, learners)
  return config, program(
    config,
    [],
    Workdir(pathlib.Path('w')),
    'localhost:7',
    learners=[Processes(hosts)] * learners,
  )


def test_chips_are_found_in_the_order_of_the_board(tmp_path):
  found = local_devices({}, _v5e_8(tmp_path))
  assert found == LocalDevices(TPU, tuple('32471560'), V5E)


@pytest.mark.parametrize(
  ('names', 'platform', 'ids'),
  [
    ([f'dev/accel{i}' for i in (10, 9, 0)], TPU, ('0', '9', '10')),
    (['dev/vfio/1', 'dev/vfio/0', 'dev/vfio/vfio'], TPU, ('0', '1')),
    # In a container, the GPUs that it was given are numbered from 0.
    (['dev/nvidia4', 'dev/nvidia7', 'dev/nvidiactl'], CUDA, ('0', '1')),
    (['dev/kfd', 'dev/dri/renderD128', 'dev/dri/card0'], ROCM, ('0',)),
  ],
)
def test_nodes_of_every_platform(tmp_path, names, platform, ids):
  found = local_devices({}, _nodes(tmp_path, *names))
  assert (found.platform, found.ids) == (platform, ids)


@pytest.mark.parametrize(
  ('environment', 'ids'),
  [
    ({}, ('0', '1')),
    ({'CUDA_VISIBLE_DEVICES': '6, GPU-ab,2,-1,3'}, ('6', 'GPU-ab', '2')),
    ({'CUDA_VISIBLE_DEVICES': ''}, None),
    ({'JAX_PLATFORMS': 'cpu'}, None),
    ({'JAX_PLATFORMS': 'tpu,cpu'}, None),
    ({'JAX_PLATFORMS': 'cuda,cpu'}, ('0', '1')),
  ],
)
def test_the_environment_says_what_may_be_used(tmp_path, environment, ids):
  # The display of a machine without AMD's driver is no accelerator.
  nodes = ('dev/nvidia0', 'dev/nvidia1', 'dev/dri/renderD128')
  found = local_devices(environment, _nodes(tmp_path, *nodes))
  assert (found.ids if found else None) == ids


def test_no_accelerator_is_none(tmp_path):
  assert local_devices({}, tmp_path) is None
  assert local_devices({}, _nodes(tmp_path, 'dev/dri/renderD128')) is None


def test_a_pair_of_chips():
  assert dict(TPUS.variables(('2', '3'), {})) == {
    'TPU_VISIBLE_CHIPS': '2,3',
    'TPU_CHIPS_PER_PROCESS_BOUNDS': '2,1,1',
    'TPU_PROCESS_BOUNDS': '1,1,1',
    'TPU_PROCESS_ADDRESSES': 'localhost:8478',
    'TPU_PROCESS_PORT': '8478',
    'CLOUD_TPU_TASK_ID': '0',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  }


@pytest.mark.parametrize(
  ('chip', 'count', 'bounds'),
  [(V5E, 1, '1,1,1'), (V5E, 4, '2,2,1'), (V6E, 2, '1,2,1'), (None, 2, '1,2,1')],
)
def test_the_bounds_of_a_process(chip, count, bounds):
  found = dataclasses.replace(TPUS, chip=chip)
  given = dict(found.variables(found.ids[:count], {}))
  assert given['TPU_CHIPS_PER_PROCESS_BOUNDS'] == bounds


def test_bounds_of_the_user_are_taken():
  name = 'TPU_CHIPS_PER_PROCESS_BOUNDS'
  assert dict(TPUS.variables(('0', '1'), {name: '1,2,1'}))[name] == '1,2,1'
  for wrong in ('2,2,1', '2', '2,x,1'):
    with pytest.raises(ConfigError, match='with the product 2'):
      TPUS.variables(('0', '1'), {name: wrong})


def test_what_sees_all_is_told_nothing():
  assert TPUS.variables(TPUS.ids, {}) == ()
  assert GPUS.variables(('3', '4'), {}) == (('CUDA_VISIBLE_DEVICES', '3,4'),)


def _told(log: pathlib.Path, starts: int) -> list[dict]:
  lines = log.read_text().splitlines() if log.exists() else []
  return [json.loads(line) for line in lines] if len(lines) >= starts else []


def test_each_process_gets_its_chips_and_gets_them_again(tmp_path):
  """Real children of the supervisor say what they were given."""
  config, whole = _program(2, 4)
  found = local_devices({}, _v5e_8(tmp_path))
  whole = dealt(whole, config, found, {})
  tell = (sys.executable, '-c', TELL)
  roles = [dataclasses.replace(role, argv=tell) for role in whole.roles]

  def log(name: str) -> pathlib.Path:
    return tmp_path / f'{name}.log'

  with Supervisor(
    roles,
    log=log,
    environment={'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.4'},
    restarts_max=3,
    restart_delay_s=0.05,
    announce=lambda event: None,
  ) as running:

    def given(name: str, starts: int = 1) -> dict:
      def all_are_there() -> bool:
        running.poll()
        return bool(_told(log(name), starts))

      until(all_are_there, DEADLINE_S, lambda: f'{name} started {starts} times')
      return _told(log(name), starts)[-1]

    learners = [given(f'learner-{i}') for i in range(4)]
    chips = [each['TPU_VISIBLE_CHIPS'] for each in learners]
    assert chips == ['3,2', '4,7', '1,5', '6,0']
    ports = {each['TPU_PROCESS_PORT'] for each in learners}
    assert len(ports) == 4
    for each in learners:
      assert 'JAX_PLATFORMS' not in each
      assert each['XLA_PYTHON_CLIENT_MEM_FRACTION'] == '0.4'
    syncer = given('syncer')
    assert syncer['JAX_PLATFORMS'] == 'cpu'
    assert not [name for name in syncer if name.startswith('TPU_')]
    running.kill('learner-2', 'to see what it gets')
    again = given('learner-2', starts=2)
    assert again == learners[2]
  assert whole.evaluate.variables(0)['TPU_VISIBLE_CHIPS'] == '3,2'
  assert chips_of(whole, found) == (
    'TPU_VISIBLE_CHIPS: learner-0 3,2; learner-1 4,7; learner-2 1,5; '
    'learner-3 6,0'
  )


def test_the_processes_of_a_learner_share_its_gpus():
  config, whole = _program(2, 3, hosts=2)
  whole = dealt(whole, config, GPUS, {})
  seen = {
    role.process(host): role.variables(host)['CUDA_VISIBLE_DEVICES']
    for role in whole.roles[1:4]
    for host in range(2)
  }
  assert seen == {
    'learner-0': '0', 'learner-0.1': '1', 'learner-1': '2',
    'learner-1.1': '3', 'learner-2': '4', 'learner-2.1': '5',
  }  # fmt: skip
  assert chips_of(whole, GPUS).endswith('learner-2.1 5; not used 6,7')


def test_unlike_learners_get_what_their_meshes_have():
  """The chips of one learner lie together, from a multiple of their number."""
  text = '1: mesh.fsdp=4; 2: mesh.fsdp=2'
  config = a_config(1, 3, unlike_learners=text, **{'data.batch': 8})
  whole = program(config, [], Workdir(pathlib.Path('w')), 'localhost:7')
  assert chips_of(dealt(whole, config, TPUS, {}), TPUS) == (
    'TPU_VISIBLE_CHIPS: learner-0 6; learner-1 0,1,2,3; learner-2 4,5; not '
    'used 7'
  )
  found = dataclasses.replace(GPUS, ids=GPUS.ids[:6])
  with pytest.raises(ConfigError, match=r'of 1 \+ 4 \+ 2 devices .* need 7'):
    dealt(whole, config, found, {})


def test_all_of_a_machine_are_one_learners():
  config, whole = _program(8, 1)
  whole = dealt(whole, config, TPUS, {})
  assert whole.roles[1].variables(0).keys() == {'LIBTPU_INIT_ARGS'}
  assert chips_of(whole, TPUS) == 'TPU_VISIBLE_CHIPS: learner-0 all'


@pytest.mark.parametrize(
  ('devices', 'learners', 'hosts', 'found', 'words'),
  [
    (4, 3, 1, TPUS, '3 learners of 4 devices .* need 12, and this machine has'),
    (4, 3, 1, TPUS, '=0,1,2,3,4,5,6,7.* such as --config.mesh.fsdp=2$'),
    (8, 2, 1, GPUS, 'share GPUs with --chips_per_learner=0 and XLA_PYTHON_CLI'),
    (8, 2, 1, MANY, '8 chips for a process: libtpu gives it 1, 2 or 4 of them'),
    (2, 2, 2, TPUS, 'learner-0 has 2 processes, and on the TPU of one machine'),
  ],
)  # fmt: skip
def test_what_can_not_be_dealt_is_refused(
  devices, learners, hosts, found, words
):
  config, whole = _program(devices, learners, hosts)
  with pytest.raises(ConfigError, match=words):
    dealt(whole, config, found, {})


def test_they_are_dealt_where_jax_can_use_them(tmp_path, monkeypatch):
  root = _nodes(tmp_path / 'root', *(f'dev/nvidia{i}' for i in range(8)))
  config = a_config(2, 4)
  assert to_be_dealt(config, None, {}, root) is None  # As on a laptop.
  _nodes(tmp_path / 'site', 'jax_plugins/xla_cuda12/__init__.py')
  monkeypatch.syspath_prepend(str(tmp_path / 'site'))
  assert to_be_dealt(config, None, {}, root) == GPUS
  assert to_be_dealt(config, 0, {}, root) is None
  assert to_be_dealt(a_config(1, 1), None, {}, root) is None
  assert to_be_dealt(a_config(1, 1), 1, {}, root) == GPUS


def test_learners_that_share_gpus_still_do(tmp_path, monkeypatch):
  root = _nodes(tmp_path / 'root', 'dev/nvidia0')
  _nodes(tmp_path / 'site', 'jax_plugins/xla_cuda12/__init__.py')
  monkeypatch.syspath_prepend(str(tmp_path / 'site'))
  config = a_config(1, 2)
  shares = {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.4'}
  assert to_be_dealt(config, None, shares, root) is None
  assert to_be_dealt(config, None, {}, root).ids == ('0',)  # Too few: refused.


def _run(tmp_path, *flags):
  """A command, with a stand-in for the machine's devices."""
  kept = {k: v for k, v in os.environ.items() if k != 'JAX_PLATFORMS'}
  return subprocess.Popen(
    [
      *(sys.executable, '-m', 'launch.local', FLAG),
      f'--workdir={tmp_path / "run"}',
      f'--device_root={tmp_path}',
      *flags,
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=kept,
  )


@pytest.mark.parametrize(
  ('flags', 'line'),
  [
    (['--config.mesh.fsdp=2'], 'error: 2 learners of 2 devices (config.mesh)'),
    ([], 'error: --chips_per_learner=2: config.mesh of learner 0 asks for 1'),
    (['--cpu_devices'], 'error: --chips_per_learner=2: --cpu_devices makes'),
    (['--device_root=/proc'], 'error: --chips_per_learner=2: no accelerator'),
  ],
)
def test_a_refusal_is_one_line(tmp_path, flags, line):
  _nodes(tmp_path, *(f'dev/accel{i}' for i in range(3)))
  launcher = _run(tmp_path, '--chips_per_learner=2', *flags)
  out, said = launcher.communicate(timeout=DEADLINE_S)
  assert (launcher.returncode, out) == (78, '')
  assert said.startswith(line)
  assert said.count('\n') == 1
  assert not (tmp_path / 'run').exists()
