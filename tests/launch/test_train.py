# SPDX-License-Identifier: Apache-2.0
"""`python -m diloco COMMAND`, and `train` on a text of one's own."""

import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import diloco.__main__ as commands
from diloco import __version__
from diloco.config import flags, run_config
from diloco.config.sections import ConfigError
from diloco.data import corpus, tokenizers
from diloco.metrics import names
from diloco.metrics.workdir import EVALUATOR, Workdir
from experiments import train as train_config
from launch import epochs, train
from tests.launch.forked import run_all

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]
# What commands import, once for all of them.
HEAVY = ('launch.local', 'diloco.run.spec', 'jax', 'optax')
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
  assert call(tmp_path, '--version').stdout == f'diloco {__version__}\n'


def test_each_command_lists_every_flag(tmp_path):
  names = list(commands.COMMANDS)
  calls = [[commands.COMMANDS[name][0], '--help'] for name in names]
  calls += [['launch.train', word] for word in ('-h', '--version')]
  *found, short, version_said = run_all(
    calls, HEAVY, cwd=tmp_path, JAX_PLATFORMS='cpu'
  )
  assert [(name, ended.err[-300:])
          for name, ended in zip(names, found) if ended.code] == []  # fmt: skip
  said = {name: ended.out for name, ended in zip(names, found)}
  assert short.out == said['train']
  assert version_said.out == f'diloco {__version__}\n'
  # What `long-run` starts took an hour, unasked.
  assert '\n  --minutes=…  (2.0)\n' in said['bench']
  for name, (module, _) in commands.COMMANDS.items():
    spec = importlib.util.find_spec(module)
    if spec.submodule_search_locations:
      spec = importlib.util.find_spec(f'{module}.__main__')
    source = pathlib.Path(spec.origin).read_text()
    defined = re.findall(r"DEFINE_\w+\(\s*'(\w+)'", source)
    shown = re.findall(r'^  --(?:\[no\])?(\w+)', said[name], re.M)
    assert {*defined} <= {*shown}, name
  given = ('workdir', 'config', 'metrics_port', 'hosts', 'token_file')
  for name, more in (
    ('train', ('steps', 'lr', 'resume', 'sweep', 'seeds')),
    ('local', ('sweep', 'seeds')),
    ('launch', ('to', 'accelerator', 'zone', 'sbatch', 'queue')),
  ):
    for flag in (*given, *more):
      assert re.search(rf'^  --{flag}\b', said[name], re.M), (name, flag)
    texts = re.findall(r'^  --.*\n      (.*)', said[name], re.MULTILINE)
    assert not [text for text in texts if text.startswith(('Of ', 'From '))]


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
  program = 'experiments/own_loop.py'
  assert commands.module_of(program) == 'experiments.own_loop'
  (tmp_path / 'experiments').mkdir()
  assert commands.module_of(program) == 'diloco.experiments.own_loop'


def test_an_experiment_that_is_a_program_runs_anywhere(tmp_path):
  words = 'dialogues.jsonl', 'asked.jsonl'
  done = call(tmp_path, 'experiments/dialogues.py', *words)
  assert done.returncode == 0, done.stderr
  assert {path.name for path in tmp_path.iterdir()} == {*words}
  done = call(tmp_path, 'experiments/absent.py')
  assert done.returncode == 78
  assert done.stderr == (
    'error: experiments/absent.py: no such file here, nor among those of '
    'diloco\n'
  )


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
  swept = train.arguments(['train', 'b.txt', '--sweep=outer.lr=0.3,0.6'])
  assert '--workdir=runs/b-sweep' in swept
  given = ['train', '--workdir=w', '--config=x.py']
  assert train.arguments(given) == given


def test_weights_set_the_keys_of_the_model(tmp_path):
  source = ROOT / 'tests' / 'models' / 'hf' / 'qwen2'
  workdir = f'--workdir={tmp_path / "run"}'
  words = ['train', 'b.txt', f'--from=hf:{source}', workdir, '--seed=3']
  given = train.arguments([*words, '--config.model.rope_theta=9'])
  keys = {'qkv_bias=True', 'vocab=64', f'init_from=hf:{source}'}
  assert {f'--config.model.{key}' for key in keys} <= {*given}
  assert '--config.inner.lr=5e-05' in given
  assert [word for word in given if 'rope_theta' in word] == [
    '--config.model.rope_theta=9'
  ]
  assert '--config.inner.lr=5e-05' not in train.arguments([*words, '--lr=1'])
  # What was edited there stays.
  (tmp_path / 'run.py').write_text('')
  again = [word for word in train.arguments(words) if '.model.' in word]
  assert again == [f'--config.model.init_from=hf:{source}']
  with pytest.raises(ConfigError, match='there is no folder none'):
    train.arguments(['train', '--from=hf:none', workdir + '2'])


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


def test_a_text_is_trained_on_by_the_runs_of_a_sweep(tmp_path):
  (tmp_path / 'book.txt').write_text(WORDS * 400)
  done = call(tmp_path, 'train', 'book.txt', '--sweep=outer.lrr=0.3,0.6')
  assert done.returncode == 78
  assert 'outer.lrr' in done.stderr and 'outer.lr?' in done.stderr, done.stderr
  done = call(tmp_path, 'train', 'book.txt', '--seeds=2')
  assert done.stderr.startswith('error: --seeds: is for --sweep')


def test_resuming_begins_no_run(tmp_path):
  (tmp_path / 'book.txt').write_text(WORDS * 400)
  done = call(tmp_path, 'train', 'book.txt', '--resume')
  assert done.returncode == 78
  assert done.stderr == 'error: --resume: runs/book holds no run\n'
  assert not (tmp_path / 'runs').exists()


def test_the_next_commands_go_on_with_this_run():
  steps = ['--config.protocol.total_steps=4', '--extend=5', '--steps=7']
  words = ['my book.txt', *steps, '--resume', '--workdir=my w', '--lr=0.1']
  title, *lines = train.next_commands('my w', 5, words).splitlines()
  assert title == 'Next:'
  assert [shlex.split(line, comments=True)[-3:] for line in lines[1::2]] == [
    ['my w', '--prompt=The ', '--seed=1'],
    [*train._program().split()[-2:], 'report', 'my w'][-3:],
    [*train._program().split()[-2:], 'tape', 'my w'][-3:],
    ['--workdir=my w', '--lr=0.1', '--steps=10'],
  ]  # fmt: skip
  longer = shlex.split(lines[-1])
  assert longer[longer.index('train') + 1] == 'my book.txt'
  assert not {'--resume', '--extend=5'} & {*longer}
  argv = train.arguments(longer[longer.index('train') :])
  assert flags.given_config(argv)['protocol']['total_steps'] == 10
  assert not any('…' in line for line in lines)
  *_, last = train.next_commands('w', 5, words, goes_on=False).splitlines()
  assert ' tape ' in last, 'no more steps where the last made it worse'


@pytest.mark.parametrize(
  ('path', 'program'),
  [('bin', 'diloco'), ('', '{}/bin/diloco')],  # An activated environment.
)
def test_the_next_commands_can_be_copied(tmp_path, monkeypatch, path, program):
  script = tmp_path / 'bin' / 'diloco'
  script.parent.mkdir()
  script.touch(0o755)
  monkeypatch.setattr('sys.executable', str(script.with_name('python')))
  monkeypatch.setenv('PATH', str(tmp_path / path))
  _, *lines = train.next_commands('w', 5, ['--workdir=w']).splitlines()
  assert {line.split()[0] for line in lines[1::2]} == {program.format(tmp_path)}


@pytest.mark.parametrize('module', ['launch.train', 'diloco.lab'])
def test_a_folder_that_can_not_be_written_to(tmp_path, module):
  tiny = f'--config={ROOT}/experiments/tests_tiny.py'
  call_ = [module, tiny, '--workdir=/proc/nope']
  (done,) = run_all([call_], cwd=tmp_path, JAX_PLATFORMS='cpu')
  assert done.code == 78, done.out + done.err
  assert done.err.startswith('error: --workdir=/proc/nope: no run can be')
  assert done.err.count('\n') == 1, done.err


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


# A text is not read so often that the model gets worse on any other.


def config_of(path, **protocol):
  given = train_config.get_config()
  given.data.update(source='text', path=str(path))
  given.protocol.update(**protocol)
  return run_config.build(given)


@pytest.fixture
def text(tmp_path):
  path = tmp_path / 'book.txt'
  path.write_bytes(b'a' * 35_000)
  return path


def test_a_small_text_has_fewer_steps(text, tmp_path):
  # 33,600 bytes are trained on; a step of 2 learners takes 2 * 8 * 128.
  config = config_of(text)
  assert epochs.steps_for(config) == 10 * 33_600 // 2048 == 164
  assert '800 steps read the 33,600 bytes of text 48.8 times; more than 10' in (
    epochs.line(config)
  )
  assert 'more than' not in epochs.line(config_of(text, total_steps=164))
  text.write_bytes(b'a' * 1_000_000)
  assert epochs.steps_for(config) == 800
  text.write_bytes(b'a' * 4267)
  assert epochs.steps_for(config) == 24, 'one cycle of H'


def test_train_takes_them_unless_steps_are_given(text):
  def keys(*words):
    given = train.arguments(['train', str(text), '--workdir=w', *words])
    return [w for w in given if 'steps' in w]

  assert keys() == [
    '--config.inner.warmup_steps=16', '--config.protocol.total_steps=164',
  ]  # fmt: skip
  assert keys('--learners=4') == [
    '--config.inner.warmup_steps=8', '--config.protocol.total_steps=82',
  ]  # fmt: skip
  assert keys('--steps=800') == ['--config.protocol.total_steps=800']
  text.write_bytes(b'a' * 1_000_000)
  assert keys() == []


@pytest.fixture
def dialogues(tmp_path, monkeypatch):
  """300 of 36 to 38 bytes, of which the last 3 are held out."""
  monkeypatch.chdir(tmp_path)
  lines = (
    {'prompt': f'what is {i} and one more?\n', 'completion': f'it is {i + 1}'}
    for i in range(300)
  )
  path = tmp_path / 'my.jsonl'
  path.write_text(''.join(json.dumps(each) + '\n' for each in lines))
  return path


def documents_of(*words):
  given = train.arguments(['train', 'my.jsonl', *words, *SHORT])
  config = run_config.build(flags.given_config(given))
  return config, epochs.documents_line(config)


SHORT = (
  '--config.data.index_path=index', '--config.data.seq_len=32',
  '--config.data.batch=4',
)  # fmt: skip


def test_json_lines_are_read_by_documents(dialogues):
  config, line = documents_of()
  assert config.data.source == 'jsonl'
  assert config.data.text_key == 'prompt+completion'
  assert config.data.batch_keys == ('tokens', 'segments', 'counted')
  # A step of 2 learners takes 2 * 4 * 32.
  tokens = sum(len(f'what is {i} and one more?\nit is {i + 1}') + 1
               for i in range(297))  # fmt: skip
  assert config.protocol.total_steps == 10 * tokens // 256
  assert line.startswith(
    f'297 documents: {config.protocol.total_steps} steps read the '
    f'{tokens:,} tokens 10.0 times'
  )
  with pytest.raises(ConfigError, match=r"has no 'text', .*: prompt, compl"):
    documents_of('--text_key=text')


def test_a_tokenizer_is_trained_once_on_what_is_trained_on(dialogues):
  words = '--tokenizer=train:300', '--workdir=runs/it'
  config, line = documents_of(*words)
  assert config.data.tokenizer == 'tokenizers:runs/it.bpe-300.json'
  assert config.model.vocab == 300
  made = pathlib.Path('runs/it.bpe-300.json')
  before = made.stat()
  assert documents_of(*words) == (config, line)
  assert made.stat() == before
  texts = corpus.training_texts(config.data)
  assert made.read_bytes() == tokenizers.train_bpe(texts, 300)
  for given, said in (
    ('train:30', 'must be train:N, N tokens, at least 300'),
    ('hf:nowhere', "there is no file 'nowhere/tokenizer.json'"),
  ):
    with pytest.raises(ConfigError, match=said):
      documents_of(f'--tokenizer={given}')


def test_a_loss_that_rose_is_called_over_fitted(tmp_path):
  workdir = Workdir(tmp_path)
  assert epochs.over_fitted(workdir) is None, 'nothing is known'
  path = workdir.metrics(EVALUATOR)
  path.parent.mkdir()
  curve = {20: 5.3433, 160: 2.3982, 200: 2.5529, 400: 5.2651}
  lines = [
    json.dumps({'step': step, names.EVAL_LOSS: loss}) + '\n'
    for step, loss in curve.items()
  ]
  path.write_text(''.join(lines))
  assert epochs.over_fitted(workdir) == (
    'the loss on held-out text rose from its minimum 2.398 at step 160 to '
    '5.265: over-fitted. More text, or about 160 steps, give a better model'
  )
  path.write_text(''.join(lines[:2]))
  assert epochs.over_fitted(workdir) is None
