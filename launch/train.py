# SPDX-License-Identifier: Apache-2.0
"""Trains on a text of your own on this machine: python -m diloco train …

  python -m diloco train [FILE_OR_FOLDER] [--steps=800] [--learners=2] \\
    [--lr=0.004] [--batch=8] [--seed=0] [--workdir=DIR] [--config.a.b=c] \\
    [--text_key=text] [--tokenizer=bytes|train:8000|hf:FOLDER] \\
    [--from=hf:DIR [--lora=16]] [--resume] [--sweep=KEY=V1,V2 [--seeds=3]]

It is `launch.local` with experiments/train.py: two learners, no fault. At the
end it draws from the model and says what can be done next. Without a text it
reads the source of Python's standard library; of a folder it reads *.txt. JSON
lines, Parquet, ArrayRecord and folders of `datasets` are known by their names
and read document by document: --text_key names the field of the text, and
--tokenizer=train:N makes a BPE of N tokens once, in runs/NAME.bpe-N.json.

The workdir is runs/NAME unless it is given. Next to it, runs/NAME.py has the
keys that differ from their defaults; once it is there, the same command takes
it, as it was edited. The same command goes on with a run that was stopped; with
--resume it never begins one, with more --steps a run that is over goes on.
--sweep makes and compares several runs, as `launch.local` does.

--from starts from weights: of a folder of Hugging Face, or of a run. It sets
the keys of the model and the tokenizer, and a smaller learning rate. With
--lora=RANK adapters alone are trained, sent and merged.

Without --steps a text is read ten times at most, in 800 steps at most: a small
model learns a small text by heart, and gets worse on any other.
"""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import flags as absl_flags

from diloco.config import config_files, flags, pretrained, run_config
from diloco.config.sections import ConfigError
from diloco.data import corpus, sources, tokenizers
from diloco.metrics import files
from diloco.metrics.workdir import Workdir
from diloco.sweeps import making
from launch import epochs, local

CONFIG = config_files.EXPERIMENTS / 'train.py'
STDLIB = 'stdlib'
TEXT = 'text'
FROM = 'from'
LR = 'inner.lr'
LORA = 'config.model.lora_rank'
RESUME = 'resume'
EXTEND = 'extend'
WARMUP = 'inner.warmup_steps'
PATH, TEXT_KEY = 'config.data.path', 'config.data.text_key'
TOKENIZER, INDEX = 'config.data.tokenizer', 'config.data.index_path'
TRAIN = 'train:'  # A tokenizer that is made of the text.
TRAINED_MIN = 300  # Tokens: 256 bytes, the end, and some that are worth it.
DEFAULT_STEPS = 800  # Of experiments/train.py, with a warm-up of its own.
SAMPLE_TOKENS = 300


def arguments(argv: Sequence[str]) -> list[str]:
  """Returns the command line of `launch.local`, the program's name first."""
  argv = flags.in_full(making.spelled_out(argv))
  if (steps := flags.value_of(EXTEND, argv)) is not None:
    print(
      f'note: --{EXTEND}={steps} is now --steps={steps}, and goes with the '
      'next release',
      file=sys.stderr,
    )
  argv = _with_text(argv)
  more = []  # Behind --config, wherever that stands.
  text = flags.value_of(TEXT, argv)
  if text is not None:
    with flags.refusing():
      source = sources.recognised(text)
    more += [f'--config.data.source={source}', f'--config.data.path={text}']
  if steps is not None:
    more.append(f'--config.{run_config.TOTAL_STEPS}={steps}')
  workdir = flags.value_of(flags.WORKDIR, argv)
  if workdir is None:
    name = STDLIB if text is None else pathlib.Path(text).resolve().stem
    name = re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-') or TEXT
    if flags.value_of(making.SWEEP, argv) is not None:
      name += '-sweep'
    workdir = str(pathlib.Path('runs') / name)
    more.append(f'--workdir={workdir}')
  written, words = own_config(workdir), [*argv, *more]
  goes_on = not flags.has_config(argv) and written.exists()
  if not flags.has_config(argv):
    config = written if goes_on else CONFIG
    words = [argv[0], f'--config={config}', *argv[1:], *more]
  with flags.refusing(ValueError, OSError):
    words += _from_weights(words, goes_on)
    if text is not None and source != TEXT and not goes_on:
      words += _text_key(words, source, text)
    words = _with_tokenizer(words, workdir)
    if not (flags.has_config(argv) or goes_on):
      words += _schedule(words)
  return words


def _text_key(words: Sequence[str], source: str, text: str) -> list[str]:
  """Returns the key of what documents have, unless it is given."""
  if flags.value_of(TEXT_KEY, words) is not None:
    return []
  index = flags.value_of(INDEX, words) or ''
  found = corpus.text_key_of(source, text, index)
  return [] if found == TEXT else [f'--{TEXT_KEY}={found}']


def _with_tokenizer(words: list[str], workdir: str) -> list[str]:
  """Returns a command line with the file of a tokenizer, and its vocabulary."""
  name = flags.value_of(TOKENIZER, words)
  if name is None:
    return words
  if name.startswith(TRAIN):
    others = [word for word in words if not word.endswith(f'={name}')]
    name = f'tokenizers:{_trained(name, others, workdir)}'
    words = [*others, f'--{TOKENIZER}={name}']
  if flags.value_of(FROM, words) is not None:  # It has a vocabulary.
    return words
  vocab = tokenizers.make_tokenizer(name).vocab
  return [*words, f'--config.model.vocab={vocab}']


def _trained(name: str, words: Sequence[str], workdir: str) -> pathlib.Path:
  """Returns the file of a tokenizer, which is trained unless it is there.

  Args:
    words: the command line without it.
  """
  size = name.removeprefix(TRAIN)
  if not (size.isdecimal() and int(size) >= TRAINED_MIN):
    raise ValueError(
      f'--tokenizer={name}: must be {TRAIN}N, N tokens, at least {TRAINED_MIN}'
    )
  folder = pathlib.Path(workdir)
  path = folder.with_name(f'{folder.name}.bpe-{size}.json')
  if not path.exists():
    data = run_config.build(flags.given_config(words)).data
    if not data.items:
      raise ValueError(
        f'--tokenizer={name}: data.source={data.source!r} is of bytes; give '
        'JSON lines, Parquet or ArrayRecord'
      )
    print(f'trains a tokenizer of {size} tokens: {path}', flush=True)
    trained = tokenizers.train_bpe(corpus.training_texts(data), int(size))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, trained)
  return path


def _from_weights(argv: Sequence[str], is_written: bool) -> list[str]:
  """Returns the keys of --from, but for those that are given.

  Args:
    is_written: whether they are in the file of the run, and may be edited.

  Raises:
    ValueError: they can't be used.
    FileNotFoundError: there are no such weights.
  """
  init_from = flags.value_of(FROM, argv)
  if init_from is None:
    return []
  keys: dict[str, object] = {'model.init_from': init_from}
  if not is_written:
    lora = flags.value_of(LORA, argv)
    lr = pretrained.LORA_LEARNING_RATE if lora else pretrained.LEARNING_RATE
    keys = {LR: lr, **pretrained.keys_of(init_from)}
  given = _given_keys(argv)
  return [f'--config.{k}={x}' for k, x in keys.items() if k not in given]


def _given_keys(words: Sequence[str]) -> set[str]:
  """Returns the keys that a command line changes."""
  return {
    match[1] for w in words if (match := re.match(r'--?config\.([\w.]+)', w))
  }


def _with_text(argv: Sequence[str]) -> list[str]:
  """Returns a command line on which a text by itself is --text.

  Raises:
    ConfigError: there are several.
  """
  words, alone = list(argv), flags.positions(argv)
  if alone[1:] or (alone and flags.value_of(TEXT, argv) is not None):
    raise ConfigError(
      [f'{argv[alone[-1]]}: unexpected argument, give one text']
    )
  for at in alone:
    words[at] = f'--{TEXT}={argv[at]}'
  return words


def _schedule(words: Sequence[str]) -> list[str]:
  """Returns the keys of a schedule that suits the text, where none is given.

  What is wrong with the words is left to those who parse them.

  Raises:
    ValueError: a document is malformed.
  """
  keys = _given_keys(words)
  try:
    config = run_config.build(
      flags.given_config([*words, f'--config.{WARMUP}=0'])
    )
    steps = config.protocol.total_steps
    if run_config.TOTAL_STEPS not in keys:
      steps = epochs.steps_for(config)
  except (ConfigError, OSError):
    return []
  if WARMUP in keys or steps == DEFAULT_STEPS:
    chosen = {}
  else:
    chosen = {WARMUP: steps // 10}
  if steps != config.protocol.total_steps:
    chosen[run_config.TOTAL_STEPS] = steps
  return [f'--config.{key}={value}' for key, value in chosen.items()]


def own_config(workdir: str) -> pathlib.Path:
  """The file beside a run's folder with the keys that it changes."""
  folder = pathlib.Path(workdir)
  return folder.with_name(f'{folder.name}.py')


def write_config(workdir: str, config: Mapping) -> None:
  """Writes that file, unless it is there, and shows it."""
  path = own_config(workdir)
  if not path.exists():
    about = 'What this run changes; `diloco config` lists all keys.'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
      config_files.source(config_files.non_default_keys(config), about)
    )
  print(f'{path}:\n\n{path.read_text()}', flush=True)


def next_commands(
  workdir: str, total_steps: int, argv: Sequence[str], goes_on: bool = True
) -> str:
  """Returns commands, one a line, each below what it does.

  Args:
    argv: the command line of the run that is over.
    goes_on: whether more steps are worth it.
  """
  program, folder = _program(), shlex.quote(workdir)
  # Of a flag that is given twice the last one counts.
  left_out = ('--resume', '--overwrite', f'--{EXTEND}')
  kept = [word for word in argv if not word.startswith(left_out)]
  longer = shlex.join([*kept, f'--steps={2 * total_steps}'])
  rows = [
    ('another sample', f"generate {folder} --prompt='The ' --seed=1"),
    ('a page with all that happened', f'report {folder}'),
    ('every decision, in order', f'tape {folder}'),
    ('trains on, to twice as many steps', f'train {longer}'),
  ]
  lines = ['Next:']
  for what, command in rows if goes_on else rows[:-1]:
    lines += [f'  # {what}', f'  {program} {command}']
  return '\n'.join(lines)


def _program() -> str:
  """Returns how `diloco` of this environment is called from here."""
  script = pathlib.Path(sys.executable).with_name('diloco')
  if not script.exists():
    return 'python -m diloco'
  is_found = shutil.which('diloco') == str(script)
  return 'diloco' if is_found else shlex.quote(str(script))


def parse(argv: Sequence[str]) -> list[str]:
  """Parses the command line as that of `launch.local`."""
  sys.argv = arguments(argv)  # Keys of --config are looked for there.
  return flags.parse(sys.argv)


def main(argv) -> int:
  """Makes the run; then shows what its model writes, and what comes next."""
  values = absl_flags.FLAGS
  if making.is_asked():
    # Only now: it imports SciPy.
    from launch import real_sweep

    return real_sweep.main(argv)
  local.checked(argv)
  workdir = Workdir(pathlib.Path(values.workdir))
  with flags.refusing(ValueError, OSError):
    if line := epochs.documents_line(run_config.build(values.config)):
      print(line, flush=True)
  if values.resume and not workdir.config.exists():
    raise ConfigError([f'--{RESUME}: {values.workdir} holds no run'])

  def show_config():
    if flags.config_file() in (str(CONFIG), str(own_config(values.workdir))):
      write_config(values.workdir, values.config)

  code = local.main(argv, show_config)
  if code:
    return code
  command = [sys.executable, '-m', 'diloco.generate', values.workdir]
  sample = subprocess.run(
    [*command, f'--length={SAMPLE_TOKENS}'], stdout=subprocess.PIPE, check=False
  )
  if not sample.returncode:
    files.replace(workdir.sample, sample.stdout)
    print(f'\nWhat the model writes:\n{sample.stdout.decode(errors="replace")}')
  total_steps = values.config.protocol.total_steps
  rose = epochs.over_fitted(workdir)
  print(next_commands(values.workdir, total_steps, OWN, goes_on=not rose))
  return 0


if __name__ == '__main__':
  OWN = sys.argv[1:]
  local.define_flags()
  making.define_flags()
  flags.define_short_flags()
  absl_flags.DEFINE_string(TEXT, None, 'The text, as it was given until 0.1.')
  absl_flags.DEFINE_string(
    FROM, None, 'Weights to start from: hf:FOLDER of Hugging Face, or a run.'
  )
  absl_flags.DEFINE_bool(RESUME, False, 'Goes on with a run; begins none.')
  absl_flags.DEFINE_integer(EXTEND, None, 'Now --steps.', lower_bound=1)
  flags.run(main, parse)
