# SPDX-License-Identifier: Apache-2.0
"""Trains on a text of your own on this machine: python -m diloco train …

  python -m diloco train [--text=FILE_OR_FOLDER] [--workdir=DIR] \\
    [--config.a.b=c] [--resume] [--extend=STEPS]

It is `launch.local` with experiments/train.py: two learners, no fault. At the
end it draws from the model and says what can be done next. Without --text it
reads the source of Python's standard library; of a folder it reads *.txt. The
workdir is runs/NAME unless it is given. Beside it, runs/NAME.py has the keys
that differ from their defaults; once it is there, the same command takes it,
as it was edited. The same command goes on with a run that was stopped; with
--resume it never begins one, with --extend the run has so many steps in all.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import flags as absl_flags

from diloco.config import config_files, flags
from diloco.config.sections import ConfigError
from diloco.metrics import files
from diloco.metrics.workdir import Workdir
from launch import local

CONFIG = config_files.EXPERIMENTS / 'train.py'
STDLIB = 'stdlib'
TEXT = 'text'
RESUME = 'resume'
EXTEND = 'extend'
SAMPLE_TOKENS = 300


def arguments(argv: Sequence[str]) -> list[str]:
  """Returns the command line of `launch.local`, the program's name first."""
  given = []  # Behind --config, wherever that stands.
  text = flags.value_of(TEXT, argv)
  if text is not None:
    given += ['--config.data.source=text', f'--config.data.path={text}']
  if (steps := flags.value_of(EXTEND, argv)) is not None:
    given.append(f'--config.protocol.total_steps={steps}')
  workdir = flags.value_of(flags.WORKDIR, argv)
  if workdir is None:
    name = STDLIB if text is None else pathlib.Path(text).resolve().stem
    name = re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-') or TEXT
    workdir = str(pathlib.Path('runs') / name)
    given.append(f'--workdir={workdir}')
  begin = []
  if not flags.has_config(argv):
    written = own_config(workdir)
    begin = [f'--config={written if written.exists() else CONFIG}']
  return [argv[0], *begin, *argv[1:], *given]


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
    path.write_text(config_files.source(config_files.changed(config), about))
  print(f'{path}:\n\n{path.read_text()}', flush=True)


def next_commands(workdir: str, total_steps: int, argv: Sequence[str]) -> str:
  """Returns three commands, one a line, each with what it does."""
  program = _program()
  folder = shlex.quote(f'--workdir={workdir}')
  changed = '--config.protocol.total_steps', f'--{EXTEND}', '--workdir'
  kept = [
    word
    for before, word in zip(['', *argv], argv)
    if not word.startswith(changed) and before not in changed
  ]
  longer = shlex.join(
    [*kept, f'--workdir={workdir}', f'--{EXTEND}={2 * total_steps}']
  )
  return '\n'.join(
    [
      'Next:',
      f'  {program} generate {folder} --prompt=…   # another sample',
      f'  {program} report {folder}   # a page with all that happened',
      f'  {program} train {longer}   # trains on',
    ]
  )


def _program() -> str:
  """Returns how `diloco` of this environment is called from here."""
  script = pathlib.Path(sys.executable).with_name('diloco')
  if not script.exists():
    return 'python -m diloco'
  if shutil.which('diloco') == str(script):
    return 'diloco'
  # Not the folder of the script itself: a shell looks up a bare name in PATH.
  below = pathlib.Path.cwd() in script.parent.parents
  return shlex.quote(os.path.relpath(script) if below else str(script))


def main(argv) -> int:
  """Makes the run; then shows what its model writes, and what comes next."""
  local.checked(argv)
  given = absl_flags.FLAGS
  if given.resume and not Workdir(pathlib.Path(given.workdir)).config.exists():
    raise ConfigError([f'--{RESUME}: {given.workdir} holds no run'])
  if flags.config_file() in (str(CONFIG), str(own_config(given.workdir))):
    write_config(given.workdir, given.config)
  code = local.main(argv)
  if code:
    return code
  command = [sys.executable, '-m', 'diloco.generate']
  sample = subprocess.run(
    [
      *command,
      f'--workdir={given.workdir}',
      f'--length={SAMPLE_TOKENS}',
    ],
    stdout=subprocess.PIPE,
    check=False,
  )
  if not sample.returncode:
    files.replace(Workdir(pathlib.Path(given.workdir)).sample, sample.stdout)
    print(f'\nWhat the model writes:\n{sample.stdout.decode(errors="replace")}')
  total_steps = given.config.protocol.total_steps
  print(next_commands(given.workdir, total_steps, OWN))
  return 0


if __name__ == '__main__':
  OWN = sys.argv[1:]
  local.define_flags()
  absl_flags.DEFINE_string(TEXT, None, 'File of text, or folder of *.txt.')
  absl_flags.DEFINE_bool(RESUME, False, 'Goes on with a run; begins none.')
  said = 'Steps that the run is to have in all; a run that is over goes on.'
  absl_flags.DEFINE_integer(EXTEND, None, said, lower_bound=1)
  sys.argv = arguments(sys.argv)
  flags.run(main)
