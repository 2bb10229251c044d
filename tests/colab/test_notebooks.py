# SPDX-License-Identifier: Apache-2.0
"""Executes the notebooks, with smaller settings, and looks at what they keep.

The settings are in the one cell with the tag `parameters`, as lines of the form
`NAME = value`; `SMALL` replaces values by name. `pytest tests/colab --rewrite`
executes them with the settings that they have, and stores the outputs.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parents[2] / 'colab'
SETTINGS = 'parameters'
SECONDS_MAX = 240  # Of one cell, on a busy machine.
STORED_BYTES_MAX = 1_000_000  # Of a notebook with its outputs.
SMALL = {
  'protocol_by_hand': {'UNTIL_S': '20'},
  'four_learners': {
    'TIME_S': '30',
    'LAYERS': '1',
    'EVAL_EVERY_STEPS': '30',
    'BESIDE': "('elastic',)",
  },
  'int4_and_rda': {
    'LEARNERS': '3',
    'LAYERS': '1',
    'COMMON_STEPS': '(0, 4)',
    'INNER_STEPS': '3',
    'ROUNDS': '4',
  },
  'a_million_chips': {
    'CHIPS': '(250_000, 1_000_000)',
    'LEARNERS': '(2, 8)',
    'LEARNER_HOURS': '0.1',
    'SEEDS': '1',
    'STEPS': '40',
  },
}
NAMES = sorted(path.stem for path in FOLDER.glob('*.ipynb'))


def _read(name: str) -> nbformat.NotebookNode:
  return nbformat.read(FOLDER / f'{name}.ipynb', as_version=4)


def _settings(notebook) -> nbformat.NotebookNode:
  (cell,) = (
    cell for cell in notebook.cells if SETTINGS in cell.metadata.get('tags', ())
  )
  return cell


def _set(cell, name: str, value: str):
  """Replaces the value of a setting; what stands behind it stays out."""
  cell.source, found = re.subn(
    rf'^{name} = .*$', f'{name} = {value}', cell.source, flags=re.MULTILINE
  )
  assert found == 1, f'{name} is set {found} times'


def test_every_notebook_has_small_settings():
  assert sorted(SMALL) == NAMES


@pytest.fixture(scope='module', name='fonts')
def fixture_fonts(tmp_path_factory):
  """A folder with Matplotlib's cache of fonts, whose making it announces."""
  folder = tmp_path_factory.mktemp('fonts')
  subprocess.run(
    [sys.executable, '-c', 'import matplotlib.font_manager'],
    env={**os.environ, 'MPLCONFIGDIR': str(folder)},
    check=True,
  )
  return folder


@pytest.fixture(name='home')
def fixture_home(fonts, tmp_path, monkeypatch):
  """Nothing is written into the user's home."""
  monkeypatch.setenv('MPLCONFIGDIR', str(fonts))
  for variable in ('IPYTHONDIR', 'JUPYTER_RUNTIME_DIR'):
    monkeypatch.setenv(variable, str(tmp_path / variable.lower()))


def _execute(notebook, folder: pathlib.Path, full: bool = False):
  NotebookClient(
    notebook,
    timeout=None if full else SECONDS_MAX,
    startup_timeout=SECONDS_MAX,
    kernel_name='python3',
    record_timing=False,
    coalesce_streams=True,
    resources={'metadata': {'path': str(folder)}},
  ).execute()


def _outputs(notebook) -> list:
  return [output for cell in _code(notebook) for output in cell.outputs]


def _code(notebook) -> list:
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def _store(name: str, executed):
  """Keeps the outputs; the rest of the file stays as it is."""
  notebook = _read(name)
  for cell, done in zip(_code(notebook), _code(executed)):
    cell.outputs, cell.execution_count = done.outputs, done.execution_count
  nbformat.write(notebook, FOLDER / f'{name}.ipynb')


@pytest.mark.soak
@pytest.mark.parametrize('name', NAMES)
def test_notebook_runs(name, home, request):
  del home
  notebook = _read(name)
  full = request.config.getoption('--rewrite')
  for setting, value in ({} if full else SMALL[name]).items():
    _set(_settings(notebook), setting, value)
  _execute(notebook, FOLDER, full)
  outputs = _outputs(notebook)
  assert not [o.text for o in outputs if o.get('name') == 'stderr']
  pictures = [o for o in outputs if 'image/png' in o.get('data', {})]
  assert len(pictures) >= 2, 'a notebook explains by pictures'
  if full:
    _store(name, notebook)


@pytest.mark.parametrize('name', NAMES)
def test_outputs_are_stored(name):
  notebook = _read(name)
  nbformat.validate(notebook)
  assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
  assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
  counts = [cell.execution_count for cell in _code(notebook)]
  assert counts == list(range(1, len(counts) + 1)), 'executed once, in order'
  outputs = _outputs(notebook)
  assert {o.output_type for o in outputs} <= {
    'stream', 'display_data', 'execute_result',
  }  # fmt: skip
  assert sum('image/png' in o.get('data', {}) for o in outputs) >= 2
  path = FOLDER / f'{name}.ipynb'
  assert path.stat().st_size < STORED_BYTES_MAX
  assert not re.search(r'/(?:home|work|tmp|root)/', path.read_text())


# The first cell ---------------------------------------------------------------


def _first(name: str = NAMES[0]) -> str:
  return _code(_read(name))[0].source


@pytest.fixture(name='defined')
def fixture_defined(tmp_path):
  """A module of what the first cell defines, before it does anything."""
  path = tmp_path / 'first_cell.py'
  path.write_text(_first().partition('\nROOT = ')[0])
  spec = importlib.util.spec_from_file_location('first_cell', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_all_begin_with_the_same_cell():
  assert {_first(name) for name in NAMES} == {_first()}


def test_first_cell_works_twice_without_a_clone_around(home, tmp_path):
  del home
  origin, here = tmp_path / 'origin', tmp_path / 'here'
  (origin / 'diloco').mkdir(parents=True)
  here.mkdir()
  for name in ('setup.py', 'diloco/__init__.py'):
    (origin / name).write_bytes((FOLDER.parent / name).read_bytes())
  git = ['git', '-C', str(origin), '-c', 'user.name=n', '-c', 'user.email=e']
  for command in (['init', '-q'], ['add', '.'], ['commit', '-qm', 'all']):
    subprocess.run([*git, *command], check=True)
  source, found = re.subn(
    r"^REPOSITORY = ''", f"REPOSITORY = '{origin}'", _first(), flags=re.M
  )
  assert found == 1
  notebook = nbformat.v4.new_notebook(
    cells=[
      *(nbformat.v4.new_code_cell(source) for _ in range(2)),
      nbformat.v4.new_code_cell('import diloco; print(diloco.__file__)'),
    ]
  )
  _execute(notebook, here)
  first, second, module = (output.text for output in _outputs(notebook))
  assert first == second and re.match(r'diloco [\w.]+, Python 3', first)
  assert module.strip() == str(here / 'diloco-clone' / 'diloco/__init__.py')


def test_first_cell_works_twice_beside_an_uploaded_wheel(
  home, tmp_path, monkeypatch
):
  """One without dependencies, which pip installs where the kernel looks."""
  del home
  here, site = tmp_path / 'here', tmp_path / 'site'
  here.mkdir()
  about = 'diloco-9.9.dist-info'
  with zipfile.ZipFile(here / 'diloco-9.9-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('diloco/__init__.py', "__version__ = '9.9'\n")
    metadata = 'Metadata-Version: 2.1\nName: diloco\nVersion: 9.9\n'
    wheel.writestr(f'{about}/METADATA', metadata)
    tags = 'Root-Is-Purelib: true\nTag: py3-none-any\n'
    wheel.writestr(f'{about}/WHEEL', f'Wheel-Version: 1.0\n{tags}')
    wheel.writestr(f'{about}/RECORD', '')
  for name, value in (
    ('PIP_TARGET', site), ('PIP_NO_INDEX', 1), ('PYTHONPATH', site),
    ('PIP_DISABLE_PIP_VERSION_CHECK', 1), ('PIP_UPGRADE', 1),
  ):  # fmt: skip
    monkeypatch.setenv(name, str(value))
  notebook = nbformat.v4.new_notebook(
    cells=[nbformat.v4.new_code_cell(_first()) for _ in range(2)]
  )
  _execute(notebook, here)
  first, second = (
    ''.join(o.text for o in cell.outputs if o.name == 'stdout')
    for cell in notebook.cells
  )
  assert first.startswith('missing: diloco-9.9-py3-none-any.whl\ninstalling')
  assert second.startswith('diloco 9.9, Python 3')
  assert first.endswith(second), 'not installed again'


def test_first_cell_says_in_one_line_what_to_set(
  defined, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv('COLAB_JUPYTER_IP', raising=False)
  with pytest.raises(defined.Stop, match='Set REPOSITORY') as stopped:
    defined.root()
  # IPython prints these in place of a traceback.
  assert stopped.value._render_traceback_() == [str(stopped.value)]


def test_first_cell_asks_for_nothing_that_it_does_not_install(
  defined, monkeypatch
):
  assert defined.lacking(FOLDER.parent) == []
  monkeypatch.setattr(defined, 'installed', lambda name: ())
  asked = {each.partition('>')[0] for each in defined.lacking(FOLDER.parent)}
  assert {'etils', 'jax', 'matplotlib', 'tensorboardX'} <= asked
  assert not asked & {'pyarrow', 'safetensors', 'tensorflow-datasets'}
