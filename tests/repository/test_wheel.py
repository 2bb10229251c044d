# SPDX-License-Identifier: Apache-2.0
"""The sdist and the wheel have everything, and need no checkout.

The wheel is built from the sdist, as an index of packages would build it.
"""

import pathlib
import shutil
import sysconfig
import tarfile
import zipfile

import pytest

from tests.commands import output
from tests.repository import tree

pytest.importorskip('setuptools', '77')  # A wheel is built without a network.

CONFIG = """
def get_config():
  return {
    'name': 'mine',
    'model': {'layers': 1, 'd_model': 16, 'heads': 1, 'kv_heads': 1,
              'head_dim': 16, 'd_ff': 16},
    'data': {'source': 'grammar', 'grammar_bytes': 1 << 16, 'seq_len': 16},
    'inner': {'warmup_steps': 1},
    'protocol': {'fragments': 2, 'sync_every_steps': 2, 'overlap_steps': 1,
                 'total_steps': 4},
    'lab': {'final_eval_batches': 1},
  }
"""


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> pathlib.Path:
  return build(tmp_path_factory.mktemp('wheel'))


def build(folder: pathlib.Path, **env: str) -> pathlib.Path:
  """Builds the wheel of a copy, where nothing is left of another build."""
  kept = ('tests/repository/', 'diloco/', 'launch/', 'experiments/')
  for name in tree.tracked(*(f'{x}*' for x in kept), '*.*', 'LICENSE'):
    if name.startswith(kept) or '/' not in name:
      (folder / 'source' / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(tree.ROOT / name, folder / 'source' / name)
  output(
    '-c',
    'from setuptools import build_meta; build_meta.build_sdist("..")',
    cwd=folder / 'source',
  )
  (source,) = folder.glob('*.tar.gz')
  with tarfile.open(source) as packed:
    packed.extractall(folder / 'unpacked', filter='data')
  (unpacked,) = (folder / 'unpacked').iterdir()
  output(
    *('-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation'),
    *('--no-index', f'--wheel-dir={folder}', '.'),
    cwd=unpacked,
    **env,
  )
  (built,) = folder.glob('*.whl')
  return built


@pytest.fixture(scope='module')
def installed(wheel) -> pathlib.Path:
  """The folder that stands for site-packages."""
  folder = wheel.parent / 'site'
  with zipfile.ZipFile(wheel) as packed:
    packed.extractall(folder)
  return folder


def call(installed, folder, *argv):
  """Calls `diloco`, with the wheel alone before the dependencies."""
  alone = {'PYTHONPATH': str(installed), 'JAX_PLATFORMS': 'cpu'}
  return output('-m', 'diloco', *argv, cwd=folder, **alone)


def test_the_wheel_has_everything_and_one_package(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  tops = {name.partition('/')[0] for name in names}
  assert {top for top in tops if not top.endswith('.dist-info')} == {'diloco'}
  inside = {
    name if name.startswith('diloco/') else f'diloco/{name}'
    for name in tree.tracked('diloco', 'launch', 'experiments')
    if not name.endswith(('.png', '.sh'))
  }
  assert inside <= names, inside - names
  assert {'diloco/py.typed', 'diloco/numerics/blocks.c'} <= names
  assert not [name for name in names if 'tests/' in name]


def test_the_sdist_has_what_the_wheel_is_built_of_and_no_tests(wheel):
  (unpacked,) = (wheel.parent / 'unpacked').iterdir()
  names = {
    path.relative_to(unpacked).as_posix()
    for path in unpacked.rglob('*')
    if path.is_file()
  }
  assert {
    *('LICENSE', 'README.md', 'pyproject.toml', 'setup.py'),
    *('diloco/py.typed', 'diloco/numerics/blocks.c'),
    *('launch/backends/gke.yaml', 'experiments/train.py'),
  } <= names
  assert not [name for name in names if name.startswith('tests/')]
  assert (wheel.parent / 'source' / 'tests').is_dir(), 'none was left out'


def test_the_library_is_the_installed_one(installed, tmp_path):
  code = (
    'import diloco\n'
    "print(diloco.plan.__module__, diloco.plan('5B', learners=2, step_s=1.0, "
    'bandwidth_gbps=2).protocol.learners)\n'
    'try: diloco.lab("experiments/absent.py")\n'
    'except ValueError as error: print(error.problems[0])'
  )
  out = output('-c', code, cwd=tmp_path, PYTHONPATH=str(installed))
  assert out.splitlines() == [
    'diloco.library.questions 2',
    "config='experiments/absent.py': no such file, such as "
    '--config=experiments/train.py',
  ]


def test_the_wheel_has_compiled_code_where_there_is_a_compiler(wheel, tmp_path):
  def compiled(path):
    return [n for n in zipfile.ZipFile(path).namelist() if n.endswith('.so')]

  if shutil.which((sysconfig.get_config_var('CC') or 'cc').split()[0]):
    (name,) = compiled(wheel)
    assert name.startswith('diloco/numerics/_blocks.')
  assert not compiled(build(tmp_path, CC='no-such-compiler'))


def test_commands_start_outside_of_a_checkout(installed, tmp_path):
  (tmp_path / 'launch.py').touch()  # A user's own does not get in the way.
  where = 'import diloco; print(diloco.__file__)'
  found = output('-c', where, cwd=tmp_path, PYTHONPATH=str(installed))
  assert found.startswith(str(installed))
  assert '  train ' in call(installed, tmp_path, '--help')
  listed = call(installed, tmp_path, 'config', 'protocol')
  assert 'protocol.total_steps' in listed
  printed = call(
    installed, tmp_path, 'local', '--config=experiments/quickstart.py',
    '--config.protocol.total_steps=99', '--print_config',
  )  # fmt: skip
  assert 'total_steps=99,' in printed


def test_a_configuration_of_ones_own_runs_in_the_lab(installed, tmp_path):
  (tmp_path / 'config.py').write_text(CONFIG)
  argv = ('--config=config.py', '--workdir=run', '--noparameters')
  call(installed, tmp_path, 'lab', *argv)
  assert (tmp_path / 'run' / 'result.json').exists()


def test_an_experiment_that_comes_with_it_is_simulated(installed, tmp_path):
  argv = ('--config=experiments/scavenging.py', '--config.study.steps=20')
  call(installed, tmp_path, 'simulate', *argv, '--outdir=report')
  assert list((tmp_path / 'report').iterdir())
