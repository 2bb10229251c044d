# SPDX-License-Identifier: Apache-2.0
"""The flag --config of every main, with --config.a.b=c to change a key, and
the flags by which processes know each other.

A main calls `define_flags()` at import, is run by `run(main)`, and gets its
configuration from `load()`. One that takes a run that was made, by its folder
alone, calls `run_of_workdir(main)`, which reads the configuration in it, or
`run_of_runs(main)`, for which the folder is all there is.
Whatever is wrong with flags or configuration, and every ConfigError that a main
raises, ends in a message on stderr and exit code 78, which launchers do not
restart.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import re
import select
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import app, flags
from ml_collections import config_flags

from diloco import __version__
from diloco.config import config_files, run_config, sections, simulation
from diloco.config.sections import ConfigError

EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h.
EXIT_INTERRUPTED = 130  # As of a shell: 128 and the signal's number.
EXIT_CUT_OFF = 69  # EX_UNAVAILABLE: a learner made all steps; no syncer.
CONFIG = 'config'
WORKDIR = 'workdir'
PRINT_CONFIG = 'print_config'
NO_RUN = 'RUN: is missing, the folder of a run, such as runs/first'
RUN_CONFIG = 'config.json'  # In the folder of a run; see `metrics.workdir`.
EXAMPLE = 'experiments/quickstart.py'
# Names of files; what is in them never stands on a command line.
ACCESS_FILES = {
  'tls_ca': 'PEM file of the CA of all peers; a server asks for certificates.',
  'tls_cert': "PEM file of this process's certificate and its chain.",
  'tls_key': 'PEM file of its private key; not readable by others.',
  'tls_name': "Name in a peer's certificate; default: the host connected to.",
  'token_file': 'File of one line that the processes of a run show each other.',
}
ACCESS_VOUCHED = {
  'insecure': 'Vouches that the network is private: listens beyond loopback.',
  'transfer_fenced': (
    'Vouches that the ports of jax_transfer, and of jax.distributed between '
    'the hosts of a learner, which accept every connection, are behind a '
    "firewall that lets only the run's machines through."
  ),
}
LOG_JSON = 'log_json'
PROXY = 'proxy'
# Flags by which a process is told which one of its kind it is.
WHO = ('learner', 'host', 'shard')
HELP = frozenset({'-h', '-help', '--help', '--helpshort', '--helpfull'})
VERSION = frozenset({'-V', '-version', '--version'})
COLUMNS = 80
# Flags of these packages are shown by --help; others come with libraries.
OURS = ('diloco', 'launch', 'tests')
# Short for a key of a run's configuration, where a command takes keys.
SHORT = {
  'steps': 'protocol.total_steps',
  'learners': 'protocol.learners',
  'lr': 'inner.lr',
  'batch': 'data.batch',
  'seed': 'seed',
  'text_key': 'data.text_key',
  'tokenizer': 'data.tokenizer',
  'lora': 'model.lora_rank',
}


def define_flags(
  values: flags.FlagValues = flags.FLAGS, argv: Sequence[str] | None = None
) -> None:
  """Defines --config; `argv` stands in for sys.argv where it is given."""
  config_flags.DEFINE_config_file(
    CONFIG,
    help_string='Configuration: experiments/NAME.py, NAME.py:ARG, or a file '
    'of yours with the keys that it changes; --config.KEY=VALUE changes a key.',
    flag_values=values,
    sys_argv=None if argv is None else list(argv),
  )
  values[CONFIG].parser = config_files.Parser()
  text = 'Writes the configuration, as a file of --config, and exits.'
  flags.DEFINE_bool(PRINT_CONFIG, False, text, flag_values=values)


def define_access_flags() -> None:
  """Defines --tls_ca and what stands beside it."""
  for name, text in ACCESS_FILES.items():
    flags.DEFINE_string(name, None, text)
  for name, text in ACCESS_VOUCHED.items():
    flags.DEFINE_bool(name, False, text)


def access_files() -> dict:
  """The names of files that were given, by flag; None where none was."""
  return {name: flags.FLAGS[name].value for name in ACCESS_FILES}


def access_vouched() -> dict:
  """Returns what the operator vouches for, by flag."""
  return {name: flags.FLAGS[name].value for name in ACCESS_VOUCHED}


def access_arguments() -> list[str]:
  """The flags that give another process the same access."""
  files = access_files().items()
  return [
    *(f'--{name}={value}' for name, value in files if value is not None),
    *(f'--{name}' for name, yes in access_vouched().items() if yes),
  ]


def define_proxy_flag() -> None:
  """Defines --proxy."""
  text = 'host:port of an HTTP proxy through which it connects by gRPC.'
  flags.DEFINE_string(PROXY, '', text)


def proxy() -> str:
  """Returns the proxy that was given; '' if none was."""
  return flags.FLAGS[PROXY].value


def define_log_flags() -> None:
  """Defines --log_json."""
  text = 'Writes every record of the log as a line of JSON.'
  flags.DEFINE_bool(LOG_JSON, False, text)


def asks_for_json(argv: Sequence[str]) -> bool:
  """Returns True if a command line contains --log_json, even an invalid one."""
  pattern = rf'--?{LOG_JSON}(=(true|t|1))?'
  return any(re.fullmatch(pattern, word, re.IGNORECASE) for word in argv)


def log_arguments() -> list[str]:
  """The flags that make another process log in the same way."""
  return [f'--{LOG_JSON}'] if flags.FLAGS[LOG_JSON].value else []


def who() -> dict[str, int]:
  """Returns the given flags of `WHO`: which learner, and which host of it."""
  numbers = (
    (name, flags.FLAGS[name].value) for name in WHO if name in flags.FLAGS
  )
  return {name: value for name, value in numbers if value is not None}


def run(
  main: Callable[[Sequence[str]], int | None],
  parser: Callable[[Sequence[str]], list[str]] | None = None,
) -> None:
  """Parses sys.argv and exits with what `main` returns.

  Args:
    main: takes what is left over of the command line.
  """
  if sys.stdout is None:  # It was closed, by >&-.
    sys.stdout = open(os.devnull, 'w')  # noqa: SIM115
  with contextlib.suppress(AttributeError):  # Of a notebook's own stream.
    sys.stdout.reconfigure(errors='replace')
  if text := asked_text(sys.argv):
    raise SystemExit(_or_exit(print)(text))
  app.run(_or_exit(main), flags_parser=_or_exit(parser or parse))


def _or_exit(work: Callable) -> Callable:
  def call(argv: Sequence[str]):
    try:
      try:
        return work(argv)
      finally:
        print(end='', flush=True)
    except ConfigError as error:
      exit_config(error)
    except KeyboardInterrupt:
      print('stopped', file=sys.stderr)
      _exit_at_once(EXIT_INTERRUPTED)
    except BrokenPipeError:
      pipe = select.poll()
      pipe.register(sys.stdout.fileno(), 0)
      if not pipe.poll(0):
        raise  # Of a socket.
      _exit_at_once(141)  # As of SIGPIPE: `| head` has read enough.

  return call


def _exit_at_once(code: int) -> None:
  """Exits without sys.exit, in which XLA's compiling threads may crash."""
  for child in multiprocessing.active_children():
    child.terminate()
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(BrokenPipeError):
      stream.flush()
  os._exit(code)


def asked_text(argv: Sequence[str]) -> str:
  """Returns what --help or --version print; '' where neither is given."""
  words = argv[1 : argv.index('--') if '--' in argv else None]
  if not HELP.isdisjoint(words):
    about = sys.modules['__main__'].__doc__ or ''
    return f'{about.strip()}\n\nFlags:\n{flags_text()}'
  return '' if VERSION.isdisjoint(words) else f'diloco {__version__}'


def flags_text() -> str:
  """Returns every flag of a command with its default and its meaning."""
  by_module = flags.FLAGS.flags_by_module_dict().items()
  own = {
    flag.name: flag
    for module, found in by_module
    for flag in found
    if module in (sys.argv[0], '__main__') or module.startswith(OURS)
  }
  lines = []
  for name in sorted(own):
    flag = own[name]
    if name == CONFIG:
      lines.append(f'  --{name}=FILE, --{name}.KEY=VALUE')
    elif flag.boolean:
      lines.append(f'  --[no]{name}' if flag.default else f'  --{name}')
    else:
      shown = str(flag.default or '').strip()
      shown = f'  ({shown})' if shown else ''
      lines.append(f'  --{name}=…{shown}')
    lines += textwrap.wrap(
      ' '.join(flag.help.split()),
      COLUMNS,
      initial_indent=' ' * 6,
      subsequent_indent=' ' * 6,
    )
  return '\n'.join(lines)


def define_short_flags() -> None:
  """Defines those of `SHORT`; `in_full` makes keys of them."""
  for name, key in SHORT.items():
    text = f'Short for --{CONFIG}.{key}.'
    flags.DEFINE_string(name, None, text)


def in_full(argv: Sequence[str]) -> list[str]:
  """Returns a command line on which `SHORT` flags are keys."""
  words = []
  for word in argv:
    match = re.fullmatch(rf'--?({"|".join(SHORT)})(=.*)?', word, re.DOTALL)
    words.append(
      f'--{CONFIG}.{SHORT[match[1]]}{match[2] or ""}' if match else word
    )
  return words


def positions(argv: Sequence[str]) -> list[int]:
  """Returns where on a command line words stand alone, before its sections."""
  alone, at = [], 1
  while at < len(argv):
    word = argv[at]
    if word == '--':
      return [*alone, *range(at + 1, len(argv))]
    if not word.startswith('-') or word == '-':
      alone.append(at)
    elif '=' not in word:
      at += _takes_next(word.lstrip('-'))
    at += 1
  return alone


def _takes_next(name: str) -> bool:
  """Returns True if the value of a flag is the next word."""
  section, _, key = name.partition('.')
  if section == CONFIG and key:
    return run_config.key_types().get(key) is not bool
  if name == CONFIG:
    return True
  return name in flags.FLAGS and not flags.FLAGS[name].boolean


def with_runs(argv: Sequence[str], most: int = 1) -> list[str]:
  """Returns a command line on which a RUN by itself is --workdir=RUN.

  Raises:
    ConfigError: there are more than `most`.
  """
  words, alone = list(argv), positions(argv)
  folder = value_of(WORKDIR, argv)
  if len(alone) > most:
    raise ConfigError(f'{argv[alone[most]]}: unexpected argument')
  if alone and folder is not None and most == 1:
    raise ConfigError(f'{argv[alone[0]]}: unexpected beside --{WORKDIR}')
  if folder is not None and not has_config(argv):
    print(
      f'note: --{WORKDIR}={folder} is now {folder} by itself; the flag goes '
      'with the next release',
      file=sys.stderr,
    )
  for at in alone:
    words[at] = f'--{WORKDIR}={argv[at]}'
  return [word for word in words if word != '--']


def run_without_config(main: Callable[[Sequence[str]], int | None]) -> None:
  """Runs a main that has no --config."""
  run(main, parse_without_config)


def run_of_runs(
  main: Callable[[Sequence[str]], int | None], most: int = 1
) -> None:
  """Runs a main that takes folders of runs, which stand behind its name.

  Args:
    most: runs that it takes.
  """
  flags.DEFINE_multi_string(WORKDIR, [], 'RUN, as it was given until 0.1.')

  def parse_runs(argv: Sequence[str]) -> list[str]:
    rest = _parse_values(with_runs(argv, most=most), flags.FLAGS)
    if not flags.FLAGS.workdir:
      raise ConfigError(NO_RUN)
    return [rest[0], *dict.fromkeys(flags.FLAGS.workdir)]

  run(main, parse_runs)


def run_of_workdir(main: Callable[[Sequence[str]], int | None]) -> None:
  """Runs a main that takes one run's configuration; see `parse_of_run`."""
  run(main, parse_of_run)


@contextlib.contextmanager
def refusing(*errors: type[Exception], flag: str = '') -> Iterator[None]:
  """Raises ConfigError for `errors`, by default those of values and files.

  Args:
    errors: what a value of the user's has caused.
    flag: the one to blame, such as '--leader=x:1'.
  """
  caught = errors or (ValueError, FileNotFoundError)
  try:
    yield
  except ConfigError:
    raise
  except caught as error:
    problem = f'{flag}: {error}' if flag else str(error)
    raise ConfigError(problem) from None


def parse_without_config(argv: Sequence[str]) -> list[str]:
  """Parses a command that has no --config; raises ConfigError."""
  return _parse_values(argv, flags.FLAGS)


def load(
  values: flags.FlagValues = flags.FLAGS, build: Callable = run_config.build
):
  """The checked configuration of the parsed flags, or exit code 78.

  Args:
    build: makes the checked value of the mapping that --config gave.
  """
  try:
    return build(values[CONFIG].value)
  except ConfigError as error:
    exit_config(error)


def exit_config(error: ConfigError) -> None:
  """Prints one line per problem on stderr, then exits with code 78."""
  for problem in error.problems:
    print(f'error: {problem}', file=sys.stderr)
  raise SystemExit(EXIT_CONFIG)


def parse(
  argv: Sequence[str],
  values: flags.FlagValues = flags.FLAGS,
  example: str = EXAMPLE,
  known_only: bool = False,
) -> list[str]:
  """Parses flags; returns what is left over, the program's name first.

  Args:
    example: a configuration that this main takes, named where there is none.
    known_only: leaves over flags that are not defined.

  Raises:
    ConfigError: an unknown flag or key, a value of the wrong type, no such
      config file, or an argument that the config file does not take.
  """
  argv, path = _with_config(argv)
  if path is None:
    raise ConfigError(f'--config: is missing, such as --config={example}')
  _check_overrides(argv, _keys(path, example))
  others = [w for w in argv if not re.fullmatch(rf'--?{PRINT_CONFIG}', w)]
  if others != argv:
    _print_config(given_config(others))
    raise SystemExit(0)
  return _parse_values(argv, values, known_only)


def _with_config(argv: Sequence[str]) -> tuple[list[str], str | None]:
  """A command line that has the path of the file that is read, and that path.

  Where keys are changed, but of no file, they are changed of the defaults.
  """
  words, path = list(argv), value_of(CONFIG, argv)
  if path is not None:
    full = config_files.find(path)
    at = words.index(path) if path in words else -1
    flag = f'--{CONFIG}={path}'
    if full != path and at > 0:
      words[at] = full
    elif full != path:
      words = [
        f'--{CONFIG}={full}' if word in (flag, flag[1:]) else word
        for word in words
      ]
    return words, full
  if any(re.match(rf'--?(no)?{CONFIG}\.', word) for word in words[1:]):
    path = config_files.DEFAULTS
    return [words[0], f'--{CONFIG}={path}', *words[1:]], path
  return words, None


def given_config(argv: Sequence[str]) -> Mapping:
  """Returns the keys of a command line; other flags are not looked at.

  Raises:
    ConfigError: as `parse`.
  """
  values = flags.FlagValues()
  define_flags(values, argv)
  parse(argv, values, known_only=True)
  return values[CONFIG].value


def _print_config(config: Mapping) -> None:
  """Prints what a command line resolves to."""
  if 'study' in config:
    resolved = dataclasses.asdict(simulation.build(config))
    resolved['study']['kind'] = config.study.kind
  else:
    resolved = run_config.unfold(dataclasses.asdict(run_config.build(config)))
  print(config_files.source(resolved, 'All keys of a run.'), end='')


def parse_of_run(
  argv: Sequence[str], values: flags.FlagValues = flags.FLAGS
) -> list[str]:
  """Calls `parse`; without --config, with that of the run that is given.

  Keys can be changed as usual: --config.run.eval_batches=64.

  Raises:
    ConfigError: as `parse`, or the folder holds no run.
  """
  argv = with_runs(argv)
  folder = value_of(WORKDIR, argv)
  if has_config(argv):
    return parse(argv, values)
  if not folder:
    raise ConfigError(NO_RUN)
  path = pathlib.Path(folder) / RUN_CONFIG
  if not path.is_file():
    raise ConfigError(
      f'{folder}: holds no {RUN_CONFIG}; give the folder of a run'
    )
  return parse([argv[0], f'--{CONFIG}={path}', *argv[1:]], values)


def _parse_values(
  argv: Sequence[str], values: flags.FlagValues, known_only: bool = False
) -> list[str]:
  try:
    rest = values(list(argv), known_only)
  except flags.Error as error:
    raise ConfigError(' '.join(str(error).split())) from None
  workdir = values[WORKDIR].value if WORKDIR in values else None
  # As a path it would be a local folder 'gs:', and go with the machine.
  if isinstance(workdir, str) and '://' in workdir:
    raise ConfigError(
      f'--workdir={workdir}: must be a folder of this machine, or a disk '
      'that is mounted here: files in it are locked and appended to, which '
      'a bucket can not do'
    )
  return rest


def arguments(values: flags.FlagValues = flags.FLAGS) -> list[str]:
  """The flags that give another process the same configuration."""
  flag = values[CONFIG]
  path = config_flags.get_config_filename(flag)
  return [
    f'--{CONFIG}={path}',
    *as_flags(config_flags.get_override_values(flag)),
  ]


def as_flags(keys: Mapping[str, object]) -> list[str]:
  """Returns the flags that give keys their values."""
  return [
    f'--{CONFIG}.{key}={str(x).lower() if isinstance(x, bool) else x}'
    for key, x in keys.items()
  ]


def has_config(argv: Sequence[str]) -> bool:
  """Returns True if a command line contains --config."""
  return value_of(CONFIG, argv) is not None


def config_file() -> str:
  """Path of the file of --config, without what stands behind its colon."""
  return config_flags.get_config_filename(flags.FLAGS[CONFIG]).partition(':')[0]


def value_of(name: str, argv: Sequence[str]) -> str | None:
  """Returns a flag's value before flags are parsed; None: it is not given."""
  for i, word in enumerate(argv):
    if match := re.fullmatch(rf'--?{name}=(.*)', word):
      return match[1]
    if re.fullmatch(rf'--?{name}', word) and i + 1 < len(argv):
      return argv[i + 1]
  return None


def _keys(path: str, example: str) -> dict[str, object]:
  """Keys and values of the config file, before flags change any."""
  config = config_files.checked(path, f'--{CONFIG}={path}', example)
  return sections.flatten(config)


def _check_overrides(argv: Sequence[str], keys: Mapping[str, object]) -> None:
  problems = []
  for word in argv:
    match = re.fullmatch(rf'--?(no)?{CONFIG}\.([^=]+)(=.*)?', word)
    if match and match[2] not in keys:
      near = sections.nearest(match[2], keys)
      problems.append(f'{word}: unknown key {match[2]}{near}')
    elif match and match[3]:
      problems += _wrong_number(word, match[3][1:], keys[match[2]])
  if problems:
    raise ConfigError(problems)


def _wrong_number(word: str, text: str, default: object) -> Iterator[str]:
  """Yields what is wrong with the value of a key that is a number or bool."""
  kind = type(default)
  if kind is bool:
    is_right = text.lower() in ('true', 'false', 't', 'f', '1', '0')
  elif kind in (int, float):
    try:
      is_right = kind(text) is not None
    except ValueError:
      is_right = False
  else:
    is_right = True
  if not is_right:
    yield f'{word}: must be of type {kind.__name__}, such as {default}'
