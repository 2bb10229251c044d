# SPDX-License-Identifier: Apache-2.0
"""Runs a learner's process to its end, once its flags are read."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
from absl import flags, logging

from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.learner_records import LearnerRecords
from diloco.config import flags as config_flags
from diloco.config import hardware, run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.learner import restore
from diloco.learner.connection import (
  RunIsOver,
  SyncerAbsent,
  SyncerAddress,
  why_refused,
)
from diloco.learner.hosts.boundary_memory import BoundaryMemory
from diloco.learner.hosts.follower import Follower
from diloco.learner.hosts.host_group import HostGroup
from diloco.learner.hosts.process_group import ProcessGroup
from diloco.learner.kept_programs import KeptPrograms
from diloco.learner.programs import LearnerPrograms
from diloco.learner.restore import CheckpointGone
from diloco.learner.syncer_client import SyncerClient
from diloco.learner.train_loop import Reformed, TrainLoop
from diloco.learner.train_state import SteppingState
from diloco.metrics.workdir import Workdir, folder_at, learner_name
from diloco.metrics.writer import process_writer
from diloco.monitoring import monitor_flags
from diloco.monitoring.monitor import Monitor
from diloco.protocol import host_messages, messages
from diloco.protocol.incarnation import incarnation_of
from diloco.protocol.learner import events as learner_events
from diloco.run.bind_policy import check_group, given_access, group_secret
from diloco.run.environment import describe
from diloco.run.event_log import LearnerEventLog
from diloco.run.spec import RunSpec, make_run_spec
from diloco.run.step_profiler import StepProfiler
from diloco.transport import sockets
from diloco.transport.auth import Access
from diloco.transport.control_client import NotAdmitted
from diloco.transport.host_channel import GroupLost, HostConnection
from diloco.transport.planes import make_plane
from diloco.transport.sockets import BadAddress, HostUnknown

# Another slice is lost, or to take part: processes of other slices go on.
EXIT_SLICES = 75


def run(config: RunConfig, values: flags.FlagValues) -> int:
  """Trains to the end of the run; returns the exit code of the process.

  Args:
    values: the flags of `python -m diloco.learner`.
  """
  syncer, slices = f'--syncer={values.syncer}', _live_slices(config, values)
  all_slices = config.mesh.slices
  config = run_config.with_slices(config, len(slices))
  with config_flags.refusing(), config_flags.refusing(BadAddress, flag=syncer):
    sockets.split(values.syncer)
    access = given_access(config.transport, bind=None)
    process_group = _process_group(config, access, values)
    monitor = monitor_flags.begin(
      config.name, learner_name(values.learner, values.host)
    )
    run_spec = make_run_spec(config)
    with config_flags.refusing(NotAdmitted, flag='--token_file'):
      reason = _why_refused(run_spec, access, values)
    if reason is not None:
      return _say_refused(reason)
    hardware.check(os.environ, config.mesh.slices)
    memory = _memory(run_spec, values, slices, values.host)
    if memory is not None:
      memory.stay_alive()
      memory.read_ahead()
    others = _join(process_group)
    if process_group.index != values.host:  # As on TPUs; what is ahead is lost.
      memory = _memory(run_spec, values, slices, process_group.index)
    run_config.check_devices(config, _device_count())
  try:
    process = _Process(
      run_spec, access, process_group, values, memory, (len(slices), all_slices)
    )
    if isinstance(others, HostConnection):
      return process.follow(others)
    left = process.train(others, monitor)
  except Reformed:
    process.end_world('other slices are to take part')
  except BrokenRecord as error:
    raise ConfigError([str(error)]) from None
  except RunIsOver as over:
    logging.info('left: %s', over)
    return 0
  except (HostUnknown, SyncerAbsent) as error:
    print(f'error: {syncer}: {error}', file=sys.stderr)
    return 1
  except (GroupLost, CheckpointGone) as error:
    process.end_world(error)
    _say_last(f'error: host {process_group.index}: {error}\n')
    _die(explained=True)
  except NotAdmitted as error:
    raise ConfigError([f'--token_file: {error}']) from None
  except Exception as error:
    if process_group.hosts == 1:
      raise
    process.end_world(error)
    _die()  # Most likely a collective, for want of another host.
  if left.refused:
    return _say_refused(left.reason)
  if left.cut_off:
    print(f'error: {left.reason}', file=sys.stderr)
  logging.info('left: %s', left.reason)
  return _exit_code(left)


def _live_slices(config: RunConfig, values: flags.FlagValues) -> list[int]:
  """Returns the slices that take part, ascending; all unless it is said.

  Raises:
    ConfigError: they are none of the learner's, or do not share its hosts.
  """
  count = config.mesh.slices
  words = values.live_slices or [str(i) for i in range(count)]
  known = {str(i) for i in range(count)}
  flag = f'--live_slices={",".join(words)}'
  if not known.issuperset(words) or len(set(words)) < len(words):
    raise ConfigError([f'{flag}: must be of 0 … {count - 1}, each once'])
  if values.hosts % len(words):
    raise ConfigError([f'{flag}: do not share --hosts={values.hosts} evenly'])
  if count > 1 and not values.memory:
    raise ConfigError([f'--memory: is missing; mesh.slices={count} need it'])
  return sorted(map(int, words))


def _process_group(
  config: RunConfig, access: Access, values: flags.FlagValues
) -> ProcessGroup:
  """Returns which process of the learner this is.

  Raises:
    ConfigError: the flags do not fit together.
    ValueError: a stranger could be one of its hosts.
  """
  secret = os.environ.get(hardware.GROUP_SECRET, '')
  process_group = ProcessGroup(
    values.hosts,
    values.host,
    values.coordinator,
    config.transport.host,
    group_secret(access, secret, values.learner),
    values.coordination,
  )
  if process_group.hosts > 1:
    has_secret = bool(access.token or secret)
    check_group(
      process_group.coordinator,
      config.transport,
      has_secret,
      **config_flags.access_vouched(),
    )
    if not has_secret:
      logging.warning(
        '--coordinator=%s: without --token_file every process that reaches it '
        'passes for a host of this learner',
        process_group.coordinator,
      )
  return process_group


def _join(process_group: ProcessGroup) -> HostGroup | HostConnection:
  """Ends the process where the learner's hosts do not all come together."""

  def lost(error: GroupLost) -> NoReturn:
    _say_last(f'error: --host={process_group.host}: {error}\n')
    _die(explained=True)

  try:
    return process_group.join(lost)
  except GroupLost as error:
    lost(error)


def _die(explained: bool = False) -> NoReturn:
  """Exits at once: jax would wait for hosts that are gone, and abort."""
  if not explained:
    sys.excepthook(*sys.exc_info())
  _say_last('')
  os._exit(1)


def _say_last(text: str):
  """Prints before the process exits at once; a full disk takes no line."""
  with contextlib.suppress(OSError):
    sys.stderr.write(text)
    sys.stderr.flush()


def _memory(
  run_spec: RunSpec, values: flags.FlagValues, slices: Sequence[int], index: int
) -> BoundaryMemory | None:
  """Returns the memory of the host of an index in its world, if it has one.

  Args:
    slices: of the world.
  """
  if not values.memory:
    return None
  part = values.hosts // len(slices)
  return BoundaryMemory(
    pathlib.Path(values.memory),
    slices[index // part],
    index % part,
    {**run_spec.fingerprints, 'learner': str(values.learner)},
  )


def _device_count() -> int:
  """Returns the number of the learner's devices; opens those of this process.

  Raises:
    ConfigError: they are not the requested ones.
    SystemExit: with 1, they can't be opened: another process may have them.
  """
  try:
    backend = jax.default_backend()
  except RuntimeError as error:
    platforms = os.environ.get(hardware.PLATFORMS, '')
    print(f'error: JAX_PLATFORMS={platforms}: {error}', file=sys.stderr)
    raise SystemExit(1) from None
  hardware.check_backend(os.environ, backend)
  return jax.device_count()


def _why_refused(
  run_spec, access: Access, values: flags.FlagValues
) -> str | None:
  """Returns why the syncer, if it is there, would refuse this learner for good.

  It is asked before a device is touched: compiling takes a minute.
  """
  if values.host or access.proxy:
    return None  # Host 0 asks for all; a proxy alone may reach the syncer.
  process = time.time_ns() // 1_000_000
  inquiry = messages.Inquiry(
    messages.PROTOCOL_VERSION,
    run_spec.config.name,
    values.learner,
    incarnation_of(process, 0),
    run_spec.fingerprints,
  )
  return why_refused(values.syncer, access, inquiry)


def _say_refused(reason: str) -> int:
  print(f'error: the syncer refused: {reason}', file=sys.stderr)
  return config_flags.EXIT_CONFIG


def _exit_code(left: learner_events.Leave) -> int:
  if left.refused:
    return config_flags.EXIT_CONFIG
  if left.done:
    return 0
  if left.cut_off:
    return config_flags.EXIT_CUT_OFF
  # Stopped by a signal; or of no use, where another process would be.
  return 128 + signal.SIGTERM if left.stopped else 1


class _Process:
  """The parts of every process of a learner, whether it leads or follows."""

  def __init__(
    self,
    run_spec: RunSpec,
    access: Access,
    process_group: ProcessGroup,
    values: flags.FlagValues,
    memory: BoundaryMemory | None,
    slices: tuple[int, int],
  ):
    self._run_spec = run_spec
    self._slices, self._all_slices = slices
    self._over = False  # The others are told to end.
    self._memory, self._kept = memory, None
    if memory is not None:
      place = f'{process_group.index} of {process_group.hosts}'
      self._kept = KeptPrograms(
        memory.path.parent, {**memory.identity, 'host': place}
      )
    self._access = access
    self._flags = values
    self._index = process_group.index
    self._several = process_group.hosts > 1
    folder = folder_at(run_spec.config.checkpoint.folder)
    self._workdir = Workdir(pathlib.Path(values.workdir), folder)
    self._name = learner_name(values.learner)
    transport = run_spec.config.transport
    self._plane = make_plane(transport.data_plane, transport.host, access)

  def follow(self, leading: HostConnection) -> int:
    """Runs a host that does not lead; returns the exit code host 0 sends."""
    records, programs = self._records(), self._programs()
    learner = self._flags.learner
    follower = Follower(
      self._index,
      leading,
      self._run_spec,
      programs,
      records,
      self._plane,
      self._workdir,
      lambda restored: SteppingState(
        self._run_spec, learner, programs, restored, records, self._memory
      ),
      self._memory,
    )
    follower.on_lost = self._ending_world(follower.on_lost)
    _stop_on_signals(follower)
    try:
      end = follower.run()
    finally:
      self._plane.close()
    logging.info('left: %s', end.reason)
    return end.code

  def train(self, hosts: HostGroup, monitor: Monitor) -> learner_events.Leave:
    """Runs the host that leads; returns why it left."""
    run_spec, learner = self._run_spec, self._flags.learner
    workdir, name = self._workdir, self._name
    programs, records = self._programs(), self._records()
    started, stored = restore.started_with(self._index, records, self._memory)
    source = hosts.agree(started, self._slices)
    restored = restore.restore(run_spec, programs, records, source, stored)
    world = messages.World(
      self._slices, self._all_slices, restored.source.kind == 'slice'
    )
    client = SyncerClient(
      run_spec,
      learner,
      SyncerAddress(
        self._flags.syncer, self._plane, self._access, workdir.summary.exists
      ),
      programs,
      restored.host,
      dataclasses.replace(restored.start, world=world),
      hosts=hosts,
      workdir=workdir,
    )
    hparams = run_config.flat(run_spec.config)
    writer = process_writer(workdir, name, hparams, monitor)
    tape = LearnerEventLog(
      workdir.learner_tape(learner),
      lambda: client.process,
      describe(run_spec.config, os.environ),
    )
    train_loop = TrainLoop(
      run_spec,
      learner,
      programs,
      restored,
      client,
      records,
      writer,
      tape,
      self._flags.notice_s,
      hosts,
      self._memory,
    )
    lost = self._ending_world(client.crash)
    hosts.watch(on_stop=train_loop.stop, on_lost=lost)
    _stop_on_signals(train_loop)
    try:
      left = train_loop.run()
      self._over = True
      hosts.tell(host_messages.EndAt(_exit_code(left), left.reason))
      return left
    except RunIsOver as over:
      self._over = True
      hosts.tell(host_messages.EndAt(0, str(over)))
      raise
    except NotAdmitted as error:
      self._over = True
      hosts.tell(host_messages.EndAt(config_flags.EXIT_CONFIG, str(error)))
      raise
    finally:
      client.close()
      hosts.close()
      writer.close()
      tape.close()
      self._plane.close()

  def end_world(self, why: object):
    """Ends this process with its last boundary in memory, if it has several
    slices; else returns.

    On whichever thread sees it first: the loop's may wait for ever in a
    collective, or read a result of one that has failed.
    """
    if self._memory is None or self._over:
      return
    step = self._memory.write()
    if step is None and not self._memory.path.exists():
      return  # No world has had a boundary yet.
    held = 'that of the last world' if step is None else f'step {step}'
    _say_last(f'a world ends, {held} is in memory: {why}\n')
    os._exit(EXIT_SLICES)

  def _ending_world(
    self, otherwise: Callable[[GroupLost], None]
  ) -> Callable[[GroupLost], None]:
    """Returns what ends the world; `otherwise` is for one without memory."""

    def lost(error: GroupLost):
      self.end_world(error)
      otherwise(error)

    return lost

  def _records(self) -> LearnerRecords:
    return LearnerRecords(
      self._workdir.checkpoints(self._name),
      self._flags.learner,
      self._run_spec.fingerprints,
      self._run_spec.config.checkpoint.keep_latest,
      say=logging.warning,
    )

  def _programs(self) -> LearnerPrograms:
    """Compiles the programs; SIGUSR1 traces the next inner steps."""
    name, run = self._name, self._run_spec.config.run
    if self._several:
      name += f'.{self._flags.host}'
    profiler = StepProfiler(
      self._workdir.profiles(name), run.profile_at_step, run.profile_steps
    )
    # Before programs are compiled: without a handler the signal ends a process.
    signal.signal(signal.SIGUSR1, profiler.ask)
    programs = LearnerPrograms(self._run_spec, kept=self._kept)
    programs.profiler = profiler
    _ = programs.frozen  # It is read before the learner says hello.
    return programs


def _stop_on_signals(running: TrainLoop | Follower):
  """Makes SIGTERM and SIGINT leave in good order."""

  def stop(number, _):
    signal.signal(number, signal.SIG_DFL)  # A second one ends at once.
    running.stop()

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
