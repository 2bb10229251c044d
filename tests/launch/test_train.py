# SPDX-License-Identifier: Apache-2.0
"""`python -m diloco COMMAND`, and `train` on a text of one's own."""

import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest

import diloco.__main__ as commands
from diloco.config import run_config
from launch import train

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]
WORDS = 'the learner and the syncer of one fragment and a round '


def call(folder, *argv):
  """Calls it outside of the checkout, as a user's own folder is."""
  return subprocess.run(
    [sys.executable, '-m', 'diloco', *argv],
    cwd=folder,
    env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )


def test_all_commands_are_there_and_listed(tmp_path):
  done = call(tmp_path, '--help')
  assert done.returncode == 0, done.stderr
  for group in commands.GROUPS:
    assert f'\n{group}:\n' in done.stdout
  for name, (module, text) in commands.COMMANDS.items():
    assert importlib.util.find_spec(module), module
    assert f'  {name:14}{text}\n' in done.stdout
  assert call(tmp_path, '--version').stdout == f'diloco {version("diloco")}\n'


HELPS = """
import os, pathlib, runpy, sys
from diloco.__main__ import COMMANDS
import jax, optax, orbax.checkpoint, flax  # Once for all.
for name, (module, _) in COMMANDS.items():
  for flag in ('--help', '-h', '--version'):
    if not (child := os.fork()):
      with open(f'{name}{flag}', 'w') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.argv = [name, flag]
        runpy.run_module(module, run_name='__main__', alter_sys=True)
      os._exit(99)  # It went on.
    print(name, flag, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_each_command_lists_every_flag(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', HELPS],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  codes = [line.split() for line in done.stdout.splitlines()]
  said = {(n, f): (tmp_path / f'{n}{f}').read_text() for n, f, _ in codes}
  assert not [(*words, said[words[0], words[1]][-300:])
              for words in codes if words[2] != '0']  # fmt: skip
  assert len(codes) == 3 * len(commands.COMMANDS)
  for name, (module, _) in commands.COMMANDS.items():
    assert said[name, '--help'] == said[name, '-h']
    spec = importlib.util.find_spec(module)
    if spec.submodule_search_locations:
      spec = importlib.util.find_spec(f'{module}.__main__')
    source = pathlib.Path(spec.origin).read_text()
    defined = re.findall(r"DEFINE_\w+\(\s*'(\w+)'", source)
    shown = re.findall(r'^  --(?:\[no\])?(\w+)', said[name, '--help'], re.M)
    assert {*defined} <= {*shown}, name
  for flag in ('page', 'workdir', 'config', 'metrics_port', 'steps', 'lr'):
    assert re.search(rf'^  --{flag}\b', said['train', '--help'], re.M), flag


def test_a_command_that_went_names_its_successor(tmp_path):
  done = call(tmp_path, 'sweep', '--help')
  assert done.returncode == 0
  assert done.stderr == (
    'note: diloco sweep is now diloco lab --sweep, and goes with the next '
    'release\n'
  )
  done = call(tmp_path, 'tape', '--workdir=nowhere')
  assert done.returncode == 78
  assert done.stderr.startswith('note: --workdir=nowhere is now nowhere by')
  done = call(tmp_path, 'replay', 'one', 'two')
  assert done.stderr == 'error: two: unexpected argument\n'


def test_whatever_a_page_runs_has_a_command():
  pages = [ROOT / 'README.md', *ROOT.glob('*/*.md')]
  said = ' '.join(page.read_text() for page in pages)
  run = set(re.findall(r'python -m ((?:diloco|launch)\.[a-z_.]*[a-z])', said))
  assert run == run & {module for module, _ in commands.COMMANDS.values()}


def test_an_unknown_command_names_the_nearest(tmp_path):
  done = call(tmp_path, 'evalute')
  assert done.returncode == 78
  assert done.stderr == (
    'error: evalute: unknown command, did you mean evaluate? '
    '(diloco --help lists all)\n'
  )


def test_a_command_that_was_removed_says_so(tmp_path):
  done = call(tmp_path, 'netbench', '--study=sites')
  assert done.returncode == 78
  assert done.stderr.startswith('error: netbench: was removed after 0.1.0')


def test_an_installation_has_launch_in_the_package(tmp_path, monkeypatch):
  assert commands.module_of('train') == 'launch.train'
  (tmp_path / 'launch').mkdir()
  monkeypatch.setattr(commands, 'HERE', tmp_path)
  assert commands.module_of('train') == 'diloco.launch.train'
  assert commands.module_of('plan') == 'diloco.plan'


def test_a_command_starts_elsewhere_and_its_exit_code_comes_back(tmp_path):
  done = call(tmp_path, 'plan', '--params=12B')
  assert done.returncode == 78
  assert 'error: --learners: is missing' in done.stderr


def test_a_text_becomes_the_flags_of_a_run():
  config = f'--config={ROOT}/experiments/train.py'
  assert train.arguments(['train', '--text=a/My book.txt']) == [
    'train', config, '--text=a/My book.txt', '--config.data.source=text',
    '--config.data.path=a/My book.txt', '--workdir=runs/My-book',
  ]  # fmt: skip
  assert train.arguments(['train']) == [
    'train',
    config,
    '--workdir=runs/stdlib',
  ]
  assert train.arguments(['train', '--workdir=w', '--extend=9']) == [
    'train', config, '--workdir=w', '--extend=9',
    '--config.protocol.total_steps=9', '--config.inner.warmup_steps=0',
  ]  # fmt: skip
  assert train.arguments(['train', 'b.txt', '--lr=0.1', '--steps=50']) == [
    'train', config, '--text=b.txt', '--config.inner.lr=0.1',
    '--config.protocol.total_steps=50', '--config.data.source=text',
    '--config.data.path=b.txt', '--workdir=runs/b',
    '--config.inner.warmup_steps=5',
  ]  # fmt: skip
  given = ['train', '--workdir=w', '--config=x.py']
  assert train.arguments(given) == given


def test_the_file_beside_a_run_is_taken_as_it_was_edited(tmp_path, capsys):
  workdir = str(tmp_path / 'runs' / 'book')
  config = run_config.defaults() | {'seed': 3}
  train.write_config(workdir, config)
  path = tmp_path / 'runs' / 'book.py'
  assert 'config.seed = 3\n' in capsys.readouterr().out
  assert 'protocol' not in path.read_text()
  path.write_text(path.read_text().replace('3', '4'))
  train.write_config(workdir, config)
  assert 'config.seed = 4\n' in capsys.readouterr().out
  assert train.arguments(['train', f'--workdir={workdir}'])[1] == (
    f'--config={path}'
  )


def test_resuming_begins_no_run(tmp_path):
  (tmp_path / 'book.txt').write_text(WORDS * 400)
  done = call(tmp_path, 'train', 'book.txt', '--resume')
  assert done.returncode == 78
  assert done.stderr == 'error: --resume: runs/book holds no run\n'
  assert not (tmp_path / 'runs').exists()


def test_the_next_commands_go_on_with_this_run():
  steps = ['--config.protocol.total_steps=4', '--extend=5', '--steps', '7']
  words = ['--workdir', 'w', 'my book.txt', *steps, '--lr=0.1', '--resume']
  title, *lines = train.next_commands('my w', 5, words).splitlines()
  assert title == 'Next:'
  assert [shlex.split(line, comments=True)[-3:] for line in lines[1::2]] == [
    ['my w', '--prompt=The ', '--seed=1'],
    [*train._program().split()[-2:], 'report', 'my w'][-3:],
    [*train._program().split()[-2:], 'tape', 'my w'][-3:],
    ['--lr=0.1', '--workdir=my w', '--steps=10'],
  ]  # fmt: skip
  assert shlex.split(lines[-1])[-4] == 'my book.txt'
  assert not any('…' in line for line in lines)
  *_, last = train.next_commands('w', 5, words, goes_on=False).splitlines()
  assert ' tape ' in last, 'no more steps where the last made it worse'


@pytest.mark.parametrize(
  ('path', 'cwd', 'program'),
  [
    ('bin', '.', 'diloco'),  # An activated environment.
    ('', '.', 'bin/diloco'),
    ('', 'bin', '{}/bin/diloco'),
    ('', 'elsewhere', '{}/bin/diloco'),
  ],
)
def test_the_next_commands_can_be_copied(
  tmp_path, monkeypatch, path, cwd, program
):
  for folder in ('bin', 'elsewhere'):
    (tmp_path / folder).mkdir()
  script = tmp_path / 'bin' / 'diloco'
  script.touch(0o755)
  monkeypatch.setattr('sys.executable', str(script.with_name('python')))
  monkeypatch.setenv('PATH', str(tmp_path / path))
  monkeypatch.chdir(tmp_path / cwd)
  _, *lines = train.next_commands('w', 5, ['--workdir=w']).splitlines()
  assert {line.split()[0] for line in lines[1::2]} == {program.format(tmp_path)}


def test_the_quickstart_ends_with_them():
  text = (ROOT / 'launch' / 'quickstart.sh').read_text()
  assert 'python -m launch.train --config=experiments/quickstart.py' in text


def test_too_short_a_text_is_refused_at_once(tmp_path):
  (tmp_path / 'short.txt').write_text(WORDS)
  done = call(tmp_path, 'train', 'short.txt')
  assert done.returncode == 78
  assert 'bytes are too short, a text needs 4267' in done.stderr
  assert not (tmp_path / 'runs').exists()


def test_a_text_is_trained_on_and_sampled(tmp_path):
  (tmp_path / 'book.txt').write_text(WORDS * 400)
  done = call(
    tmp_path,
    'train',
    f'--config={ROOT}/experiments/train.py:quicktest',
    'book.txt',
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert re.search(
    r'40 steps read the \d+,\d+ bytes of text \d\.\d times', done.stdout
  )
  assert 'killed' not in done.stdout
  assert 'What the model writes:' in done.stdout
  assert 'generate runs/book --prompt' in done.stdout
  assert (tmp_path / 'runs' / 'book' / 'summary.json').exists()
