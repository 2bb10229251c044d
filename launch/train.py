# SPDX-License-Identifier: Apache-2.0
"""Trains on a text of your own on this machine: python -m diloco train …

  python -m diloco train [--text=FILE_OR_FOLDER] [--workdir=DIR] \\
    [--config.a.b=c]

It is `launch.local` with experiments/train.py: two learners, no fault. At the
end it draws from the model and says what can be done next. Without --text it
reads the source of Python's standard library; of a folder it reads *.txt. The
workdir is runs/NAME unless it is given. The same command goes on with a run
that was stopped.
"""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from absl import flags as absl_flags

from diloco.config import flags
from launch import local

CONFIG = pathlib.Path(__file__).parents[1] / 'experiments' / 'train.py'
STDLIB = 'stdlib'
TEXT = 'text'
SAMPLE_TOKENS = 300


def arguments(argv: Sequence[str]) -> list[str]:
  """Returns the command line of `launch.local`, the program's name first."""
  text = flags.value_of(TEXT, argv)
  begin = [] if flags.has_config(argv) else [f'--config={CONFIG}']
  given = []  # Behind --config, wherever that stands.
  if text is not None:
    given += ['--config.data.source=text', f'--config.data.path={text}']
  if flags.value_of(flags.WORKDIR, argv) is None:
    name = STDLIB if text is None else pathlib.Path(text).resolve().stem
    name = re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-') or TEXT
    given.append(f'--workdir={pathlib.Path("runs") / name}')
  return [argv[0], *begin, *argv[1:], *given]


def next_commands(workdir: str, total_steps: int, argv: Sequence[str]) -> str:
  """Returns three commands, one a line, each with what it does."""
  # As it was called: an activated environment has the script.
  program = 'diloco' if shutil.which('diloco') else 'python -m diloco'
  folder = shlex.quote(f'--workdir={workdir}')
  steps = '--config.protocol.total_steps='
  kept = [word for word in argv if not word.startswith((steps, '--workdir'))]
  longer = shlex.join(
    [*kept, f'--workdir={workdir}', f'{steps}{2 * total_steps}']
  )
  return '\n'.join(
    [
      'Next:',
      f'  {program} generate {folder} --prompt=…   # another sample',
      f'  {program} report {folder}   # a page with all that happened',
      f'  {program} train {longer}   # trains on',
    ]
  )


def main(argv) -> int:
  """Makes the run; then shows what its model writes, and what comes next."""
  code = local.main(argv)
  if code:
    return code
  given = absl_flags.FLAGS
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
    print(f'\nWhat the model writes:\n{sample.stdout.decode(errors="replace")}')
  total_steps = given.config.protocol.total_steps
  print(next_commands(given.workdir, total_steps, OWN))
  return 0


if __name__ == '__main__':
  OWN = sys.argv[1:]
  local.define_flags()
  absl_flags.DEFINE_string(TEXT, None, 'File of text, or folder of *.txt.')
  sys.argv = arguments(sys.argv)
  flags.run(main)
