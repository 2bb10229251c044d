# SPDX-License-Identifier: Apache-2.0
"""`launch/environment.sh`, with stand-ins for the venv module and pip."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
VENV = f"""#!/bin/sh
[ "$2" = venv ] || exec {sys.executable} "$@"
mkdir -p "$3/bin" && touch "$3/pyvenv.cfg" && ln -s /bin/true "$3/bin/python"
"""


def _make(folder: pathlib.Path) -> subprocess.CompletedProcess:
  """Makes an environment in `folder`, by a python beside it."""
  for name, text in (('python', VENV), ('sync', '#!/bin/sh\n')):
    program = folder.with_name(name)
    program.write_text(text)
    program.chmod(0o755)
  here = folder.parent
  return subprocess.run(
    [
      'bash',
      '-c',
      f'source launch/environment.sh; make_environment {folder} x',
    ],
    cwd=ROOT,
    env=os.environ
    | {'PYTHON': f'{here}/python', 'PATH': f'{here}:{os.environ["PATH"]}'},
    capture_output=True,
    text=True,
    check=False,
  )


def test_an_environment_interrupted_while_it_was_cleared_is_made_anew(tmp_path):
  folder = tmp_path / 'env'
  (folder / 'lib').mkdir(parents=True)
  (folder / '.unfinished').touch()
  made = _make(folder)
  assert made.returncode == 0, made.stderr
  assert (folder / '.complete').exists()
  assert not (folder / 'lib').exists()
  assert not (folder / '.unfinished').exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
  folder = tmp_path / 'env'
  folder.mkdir()
  (folder / 'mine').touch()
  made = _make(folder)
  assert made.returncode == 1
  assert 'exists and is no virtual environment' in made.stderr
  assert (folder / 'mine').exists()
