# SPDX-License-Identifier: Apache-2.0
"""Executes the notebooks, with smaller settings, and looks at what they keep.

The settings are in the one cell with the tag `parameters`, as lines of the form
`NAME = value`; `SMALL` replaces values by name.
"""

import os
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parents[2] / 'colab'
SETTINGS = 'parameters'
SECONDS_MAX = 240  # Of one cell, on a busy machine.

SMALL = {
  'protocol_by_hand': {'UNTIL_S': '20'},
  'four_learners': {
    'STEPS': '16',
    'LAYERS': '1',
    'FRAGMENTS': '1',
    'SYNC_EVERY_STEPS': '2',
    'EVAL_EVERY_STEPS': '8',
    'BASELINES': "('data_parallel',)",
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
    'LINK_STEPS': '50',
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


@pytest.mark.parametrize('name', NAMES)
def test_notebook_runs(name, fonts, tmp_path, monkeypatch):
  # Nothing is written into the user's home.
  monkeypatch.setenv('MPLCONFIGDIR', str(fonts))
  for variable in ('IPYTHONDIR', 'JUPYTER_RUNTIME_DIR'):
    monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
  notebook = _read(name)
  for setting, value in SMALL[name].items():
    _set(_settings(notebook), setting, value)
  client = NotebookClient(
    notebook,
    timeout=SECONDS_MAX,
    kernel_name='python3',
    resources={'metadata': {'path': str(FOLDER)}},
  )
  client.execute()
  outputs = [
    output
    for cell in notebook.cells
    if cell.cell_type == 'code'
    for output in cell.outputs
  ]
  assert not [o.text for o in outputs if o.get('name') == 'stderr']
  pictures = [o for o in outputs if 'image/png' in o.get('data', {})]
  assert len(pictures) >= 2, 'a notebook explains by pictures'


@pytest.mark.parametrize('name', NAMES)
def test_notebook_is_stripped(name):
  notebook = _read(name)
  nbformat.validate(notebook)
  assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
  for cell in notebook.cells:
    assert cell.cell_type != 'code' or (
      not cell.outputs and cell.execution_count is None
    ), cell.id
  assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_all_begin_with_the_same_cell():
  first = [
    next(cell.source for cell in _read(name).cells if cell.cell_type == 'code')
    for name in NAMES
  ]
  assert set(first) == {first[0]}
  assert "REPOSITORY = ''" in first[0], 'the user sets it'


@pytest.mark.parametrize('name', NAMES)
def test_notebook_stands_in_the_table(name):
  assert f'({name}.ipynb)' in (FOLDER / 'README.md').read_text()
