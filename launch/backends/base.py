# SPDX-License-Identifier: Apache-2.0
"""Shared by back ends: programs that they run, and command lines.

A back end is a subclass of `Backend` in a module of its own, and a line of
`backends.BACKENDS`. Nothing goes through a shell here: an argument is an
argument.
"""

import dataclasses
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from diloco.monitoring import monitor_flags
from launch.job import JobSpec
from launch.program import KINDS, LEARNER, RENDEZVOUS, SYNCER, Task, host_flags

Run = Callable[..., str]  # argv, standard input -> what it printed.


class CommandFailed(Exception):
  """A program is missing, or ended with another code than 0."""

  def __init__(self, argv: Sequence[str], reason: str, stderr: str = ''):
    self.argv = tuple(argv)
    self.stderr = stderr.strip()
    lines = [f'{shlex.join(argv)}: {reason}', *self.stderr.splitlines()]
    super().__init__('\n  '.join(lines))


def run(argv: Sequence[str], text: str = '') -> str:
  """Runs a command and returns its output; `text` is its standard input.

  Raises:
    CommandFailed: the program does not exist, or it failed.
  """
  if shutil.which(argv[0]) is None:
    raise CommandFailed(argv, f'there is no program {argv[0]!r} on the PATH')
  ended = subprocess.run(
    list(argv), input=text, capture_output=True, text=True, check=False
  )
  if ended.returncode != 0:
    raise CommandFailed(argv, f'exit code {ended.returncode}', ended.stderr)
  return ended.stdout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
  """Starts a launch, and adds and removes learners.

  The fields that `job.option` makes are its flags.

  Attributes:
    TRAITS: says which of `JobOptions` it takes, such as `job.CONTAINERS`.
    TPUS: True if it takes TPUs only, False if it takes none, None for any.
    NEEDS: flags that must be given.
  """

  TRAITS: ClassVar[frozenset[str]] = frozenset()
  TPUS: ClassVar[bool | None] = None
  NEEDS: ClassVar[tuple[str, ...]] = ()

  dry_run: bool = False  # It only says what it would do.
  say: Callable[[str], Any] = print
  run: Run = run

  def start(self, whole: JobSpec) -> int:
    """Starts the syncer and the first learners; returns an exit code."""
    raise NotImplementedError

  def add(self, whole: JobSpec, learner: int) -> int:
    """Starts one learner of a run that goes on."""
    raise NotImplementedError

  def remove(self, whole: JobSpec, learner: int) -> int:
    """Ends one learner for good."""
    raise NotImplementedError

  @property
  def shares_workdir(self) -> bool:
    """Returns True if all processes see one workdir."""
    return False

  def problems(self) -> Iterator[str]:
    """Yields why its flags can not be."""
    yield from ()

  def notes(self) -> Iterator[str]:
    """Yields what the user may not expect."""
    if not self.shares_workdir:
      yield (
        "learners' metrics and tapes go with their machines; --shared_claim "
        'on GKE or --results_bucket for TPU VMs keeps them'
      )

  def act(self, argv: Sequence[str], text: str = '') -> str:
    """Runs a command and says what it prints; a dry run shows the command."""
    if self.dry_run:
      self.say(f'# {shlex.join(argv)}')
      output, shown = '', text
    else:
      output = shown = self.run(argv, text)
    if shown:
      self.say(shown.rstrip('\n'))
    return output


def seeing(whole: JobSpec, is_shared: bool) -> JobSpec:
  """Leaves out an evaluator that would not see the checkpoints of all shards.

  Args:
    is_shared: whether all machines have one workdir.
  """
  if not (whole.shards and whole.evaluator) or is_shared:
    return whole
  print(
    'note: no evaluator runs: it would not see the checkpoints of all shards; '
    'one workdir for all (--shared_claim, or Slurm) has them',
    file=sys.stderr,
  )
  return dataclasses.replace(whole, evaluator=None)


# Command lines with the addresses that only the machines themselves know. What
# is fixed is quoted for a shell; what a machine fills in ("$host") is not.


@dataclasses.dataclass(frozen=True)
class Addresses:
  """Values that only a machine itself knows, as a back end writes them."""

  address: str  # Where its process is reached.
  syncer: str = ''  # 'host:port'; not for the syncer.
  index: str = ''  # Which host of a learner it is; for learners of several.
  coordinator: str = ''  # 'host:port' where these meet.
  learner: str = ''  # Its id, where one command line is for several.
  rendezvous: str = ''  # 'host:port'; for a slice of several.


def addressed(whole: JobSpec, role: Task, known: Addresses) -> list[str]:
  """The flags of a role that name addresses."""
  flags = []
  if peer := KINDS[role.kind].peer:
    syncer = known.syncer
    if role.kind == SYNCER:
      syncer = f'{known.address}:{whole.port}'
    elif role.kind == RENDEZVOUS:
      syncer = f'{known.address}:{whole.rendezvous_port(role)}'
    # Its own address, and not 0.0.0.0: no more doors than the peers need.
    flags = [f'--config.transport.host={known.address}', f'--{peer}={syncer}']
  hosts = role.resources.accelerator.hosts
  if role.slice is not None:
    flags.append(f'--rendezvous={known.rendezvous}')
    flags += [f'--slice_host={known.index}'] if hosts > 1 else []
  elif role.kind == LEARNER:
    flags += host_flags(hosts, known.index, known.coordinator)
  if port := whole.metrics_port_of(role):
    if known.learner:
      port = f'$(({port - role.learner} + {known.learner}))'
    flags += monitor_flags.arguments(known.address, port)
  return flags


def shell_command(
  program: Sequence[str], whole: JobSpec, role: Task, known: Addresses
) -> str:
  """Returns one shell command; what is `known` is text for within "…"."""
  fixed = shlex.join([*program, '-m', role.module, *role.arguments])
  filled = (f'"{flag}"' for flag in addressed(whole, role, known))
  return ' '.join([fixed, *filled])


def script(
  body: str, title: str, values: Mapping[str, Any], functions: Mapping[str, str]
) -> str:
  """Returns a script of bash.

  Args:
    body: a file of this folder, that the rest stands above.
    title: its first comment.
    values: of its variables; a sequence becomes an array.
    functions: the command of each.
  """
  lines = ['#!/bin/bash', f'# {title}']
  for key, value in values.items():
    is_array = isinstance(value, list)
    word = f'({shlex.join(value)})' if is_array else shlex.quote(str(value))
    lines.append(f'{key}={word}')
  for name, command in functions.items():
    lines.append(f'{name}() {{\n  {command}\n}}')
  text = pathlib.Path(__file__).with_name(body).read_text()
  return '\n'.join((*lines, '', text))
