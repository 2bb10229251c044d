# SPDX-License-Identifier: Apache-2.0
"""What README and docs tell to run, run as a reader does who has the wheel.

In a virtual environment with the wheel and what it needs, without the checkout;
each page in a folder that holds only a reader's own files: a text, documents in
three formats, a model of Hugging Face. Its blocks between ```sh and ```, and
those of Python, run in order and as they stand there, each in a process.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from tests.commands import output
from tests.data import made_files
from tests.repository import test_wheel, tree
from tests.repository.test_examples import PAGES, all_blocks

pytestmark = pytest.mark.soak

RUNS = {'sh': ('bash', '-euo', 'pipefail'), 'python': ('python',)}
BLOCKS = {
  name: [
    block
    for block in all_blocks((tree.ROOT / name).read_text())
    if block[1] in RUNS
  ]
  for name in tree.tracked(*PAGES)
}
# The one difference from the pages: what trains ends after some steps.
SHORTER = """
diloco() {
  case $1 in
    train | lab | local) set -- "$@" --steps=24 --config.inner.warmup_steps=8 ;;
  esac
  command diloco "$@"
}
"""
DOCUMENTS = 50
MODEL = tree.ROOT / 'tests' / 'models' / 'hf' / 'llama'


@pytest.fixture(scope='module')
def environment(tmp_path_factory) -> dict[str, str]:
  """The variables of a reader's shell; `diloco` is that of the wheel."""
  folder = tmp_path_factory.mktemp('installed')
  wheel = test_wheel.build(folder)
  venv = folder / 'venv'
  output('-m', 'venv', '--without-pip', venv)
  python = venv / 'bin' / 'python'
  output(
    *('-m', 'pip', f'--python={python}', 'install', '--quiet', '--no-index'),
    *('--no-deps', wheel),
  )
  # Its dependencies are those of this environment; a .pth file in there, such
  # as that of a checkout, does not count.
  (site,) = venv.glob('lib/python*/site-packages')
  (site / 'dependencies.pth').write_text(
    '\n'.join(path for path in sys.path if path.endswith('site-packages'))
  )
  env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'} | {
    'PATH': f'{venv / "bin"}:{os.environ["PATH"]}',
    'JAX_PLATFORMS': 'cpu',
    'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  where = 'import diloco; print(diloco.__file__)'
  found = subprocess.check_output([python, '-c', where], env=env, cwd=folder)
  assert found.decode().startswith(str(site))
  return env


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
  """What a reader has, by the names that the pages give it."""
  import zstandard

  # The last one of a file is held out; it holds a window of word pieces.
  last = ' '.join(made_files.texts(8, seed=1))
  texts = [*made_files.texts(DOCUMENTS), last, last]
  (tmp_path / 'book.txt').write_text('\n'.join(texts))
  (tmp_path / 'my.jsonl').write_text(json_lines('text', texts))
  # In word pieces a text is short.
  many = [*made_files.texts(3 * DOCUMENTS), last]
  (tmp_path / 'bodies.jsonl.zst').write_bytes(
    zstandard.compress(json_lines('body', many).encode())
  )
  made_files.parquet(tmp_path / 'parquet-files', texts)
  shutil.copytree(MODEL, tmp_path / 'llama')
  write_tokenizer(tmp_path / 'llama', sorted({*''.join(texts)}))
  return tmp_path


def json_lines(key: str, texts: list[str]) -> str:
  return '\n'.join(json.dumps({key: text}) for text in texts)


def write_tokenizer(folder: pathlib.Path, characters: list[str]):
  """One token a character: the model knows 64."""
  import tokenizers

  names = ['<unk>', '<s>', '</s>', *characters]
  known = {name: i for i, name in enumerate(names)}
  made = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(known, unk_token='<unk>')
  )
  made.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex('.'), 'isolated'
  )
  made.add_special_tokens(names[:3])
  made.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')


def run(page: str, env: dict[str, str], folder: pathlib.Path, found) -> str:
  """Runs blocks in order; returns what is wrong with the first bad one."""
  for line, language, text in found:
    script = folder.with_name(f'{folder.name}.{language}')
    script.write_text(
      SHORTER + text if language == 'sh' else '\n' * (line - 1) + text
    )
    process = subprocess.Popen(
      [*RUNS[language], script],
      cwd=folder,
      env=env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    )
    try:
      out, _ = process.communicate()
    finally:  # The test is out of time, or a block has left processes.
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
      return f'{page}:{line}: exit code {process.returncode}\n{out[-3000:]}'
  return ''


@pytest.mark.parametrize('page', [name for name in BLOCKS if BLOCKS[name]])
def test_a_page_runs_without_a_checkout(page, environment, folder):
  assert not run(page, environment, folder, BLOCKS[page])


def test_a_command_that_fails_is_named(environment, folder):
  page = '```sh\necho it goes\ndiloco train absent.jsonl\necho on\n```\n'
  wrong = run('page.md', environment, folder, all_blocks(page))
  assert wrong.startswith('page.md:2: exit code 78\nit goes\nerror: ')


def test_pages_for_readers_have_commands_that_run():
  pages = {
    name
    for name, found in BLOCKS.items()
    if any(language == 'sh' for _, language, _ in found)
  }
  assert pages == {
    f'docs/{name}.md'
    for name in ('api', 'data', 'models', 'planning', 'running')
  }
