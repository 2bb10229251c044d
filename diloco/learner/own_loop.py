# SPDX-License-Identifier: Apache-2.0
"""A learner around a train loop that is not ours.

The loop makes the steps, with any optimizer, data and sharding. Between two
steps it calls `Learner.boundary`, which does what our own train loop does there
(`learner.boundaries`), with the same machine, messages and checks. The
parameters may be any pytree of arrays; a leaf is one tensor of the exchange,
and its path in the tree is its name.

What cannot be done for such a loop: a run is not replayed from its event log,
as nobody but the loop can make a step again.
"""

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.checkpoint.parameters import write_parameters
from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.learner import restore
from diloco.learner.boundaries import Boundaries
from diloco.learner.connection import RunIsOver, SyncerAddress
from diloco.learner.exchange_programs import ROOM, ExchangePrograms, like
from diloco.learner.hosts.follower import Follower
from diloco.learner.hosts.host_group import HostGroup
from diloco.learner.hosts.process_group import meet
from diloco.learner.syncer_client import SyncerClient
from diloco.learner.train_state import TrainState
from diloco.metrics.workdir import Workdir, folder_at, learner_name
from diloco.metrics.writer import process_writer
from diloco.models import api
from diloco.models.given import given_model
from diloco.models.kinds import GIVEN, TREE
from diloco.numerics import fragments
from diloco.protocol import host_messages
from diloco.run.bind_policy import open_access
from diloco.run.environment import describe
from diloco.run.event_log import LearnerEventLog
from diloco.run.spec import INITIAL, RunSpec, make_run_spec
from diloco.transport import sockets
from diloco.transport.host_channel import GroupLost
from diloco.transport.planes import make_plane

NOTICE_S = 25.0  # Within which a learner that is told to stop leaves.
ROLES = tuple(role for role in api.ROLES if role != api.FROZEN)
FAILED, REFUSED = 1, 2  # Why the hosts end; 0: it is over, or was stopped.
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


class RunOver(Exception):
  """`boundary` was called again after the run had ended."""


@dataclasses.dataclass(frozen=True)
class Sync:
  """The settings that syncer and learners of a run have in common.

  Attributes:
    every: H, steps between two offers of a fragment.
    fragments: P, parts that are synchronised in turn; at most as many as there
      are arrays, unless these are embeddings or stacked.
    learners: M, learner ids that the run begins with.
    steps: t at which it ends.
    roles: path -> how an array may be cut and merged, for those that are not
      one tensor: 'stacked' (axis 0 counts layers), 'embedding' (axis 0 counts
      rows, merged by plain means), 'averaged' (such as statistics).
    config: any other key of a run's configuration, such as
      {'codec.up': 'int8', 'outer.lr': 0.7}; `diloco config` lists them.
  """

  every: int = 24
  fragments: int = 8
  learners: int = 2
  steps: int = 1000
  roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
  config: Mapping[str, object] = dataclasses.field(default_factory=dict)

  def run_config(self, initial: str = '') -> RunConfig:
    """Returns the configuration of the run's processes.

    Args:
      initial: folder with the parameters that the run begins with, of the
        syncer.

    Raises:
      ConfigError: it can't be run.
    """
    values = run_config.defaults()
    settings = {
      'model.kind': GIVEN,
      'model.given': initial,
      'data.source': GIVEN,
      'data.seq_len': 1,
      'data.batch': 1,
      'data.shards': max(16, self.learners),
      'protocol.sync_every_steps': self.every,
      'protocol.fragments': self.fragments,
      'protocol.learners': self.learners,
      'protocol.total_steps': self.steps,
      'inner.warmup_steps': 0,
      'run.eval_every_rounds': 0,
      **self.config,
    }
    for key, value in settings.items():
      section, _, name = key.rpartition('.')
      (values[section] if section else values)[name] = value
    return run_config.build(values)


class RunningSyncer:
  """A syncer process that was started here; a context that ends it.

  Attributes:
    address: host:port, for learners.
  """

  def __init__(
    self, address: str, process: subprocess.Popen, log: pathlib.Path
  ):
    self.address = address
    self._process, self._log = process, log

  def wait(self):
    """Waits for the end of the run.

    Raises:
      RuntimeError: the syncer failed.
    """
    if code := self._process.wait():
      raise RuntimeError(f'the syncer ended with {code}: see {self._log}')

  def __enter__(self) -> 'RunningSyncer':
    return self

  def __exit__(self, *exception):
    self._process.terminate()
    self._process.wait()


def start_syncer(
  workdir: str | os.PathLike,
  params: Any,
  sync: Sync,
  *,
  address: str = '',
  flags: Sequence[str] = (),
) -> RunningSyncer:
  """Starts a syncer process for a run; a context that ends it.

  Whoever starts it decides what the run begins with. One that is started again
  in the same workdir goes on from its checkpoint.

  Args:
    workdir: folder of the run.
    params: pytree of arrays, Θ as the run begins.
    address: host:port to listen at; '': a free port of this machine.
    flags: more flags of `python -m diloco.syncer`, such as --token_file=FILE.

  Raises:
    ConfigError: the configuration, or `params`, can't be used.
  """
  root = pathlib.Path(workdir).absolute()
  tree = Tree(params, sync.roles)
  config = sync.run_config(str(root))
  make_run_spec(
    config, given_model(tree.table)
  )  # It is refused here, if at all.
  root.mkdir(parents=True, exist_ok=True)
  if not (root / INITIAL).exists():
    write_parameters(root / INITIAL, tree.to_host(params))
  (root / TREE).write_text(json.dumps(tree.table))
  path = root / 'config.json'
  path.write_text(json.dumps(dataclasses.asdict(config)))
  host = config.transport.host
  address = address or f'{host}:{sockets.free_port(host)}'
  command = (
    *(sys.executable, '-m', 'diloco.syncer', f'--bind={address}'),
    *(f'--config={path}', f'--workdir={root}', *flags),
  )
  log = root / 'syncer.log'
  with log.open('ab') as file:
    process = subprocess.Popen(command, stdout=file, stderr=file)
  return RunningSyncer(address, process, log)


class Tree:
  """The parameters' tree: names, shapes, and what may be done with each array.

  Args:
    params: pytree of arrays.
    roles: as in `Sync`.

  Raises:
    ConfigError: a leaf is no array of floating-point numbers, or `roles` names
      none of them.
  """

  def __init__(self, params: Any, roles: Mapping[str, str] = {}):
    leaves, self.structure = jax.tree_util.tree_flatten_with_path(params)
    named = {
      jax.tree_util.keystr(path, simple=True, separator='/') or 'params': leaf
      for path, leaf in leaves
    }
    problems = []
    if len(named) < len(leaves):
      problems.append('params: two leaves have the same path')
    for name, leaf in named.items():
      if getattr(leaf, 'dtype', None) not in FLOATS or not leaf.size:
        problems.append(
          f'params: {name} is {_described(leaf)}, must be an array of '
          'float32, bfloat16 or float16; carry anything else in opt_state'
        )
    problems += [
      f'roles: {name!r} is no parameter; there are {", ".join(named)}'
      for name in roles
      if name not in named
    ]
    problems += [
      f'roles: {name}={role!r}: must be one of {", ".join(ROLES)}'
      for name, role in roles.items()
      if role not in ROLES
    ]
    if problems:
      raise ConfigError(problems)
    self.names = tuple(named)
    self.table = {
      name: {'shape': list(leaf.shape), 'role': roles.get(name, api.PLAIN)}
      for name, leaf in named.items()
    }

  def flat(self, params: Any) -> dict[str, Any]:
    """Returns name -> leaf.

    Raises:
      ValueError: it is another tree.
    """
    leaves, structure = jax.tree.flatten(params)
    if structure != self.structure:
      raise ValueError(
        f'params have the structure {structure}, this learner began with '
        f'{self.structure}'
      )
    return dict(zip(self.names, leaves))

  def nested(self, flat: Mapping[str, Any]) -> Any:
    """Returns the tree of name -> leaf."""
    return self.structure.unflatten([flat[name] for name in self.names])

  def to_host(self, params: Any) -> dict[str, np.ndarray]:
    """Returns name -> f32 array on the host."""
    flat = self.flat(params)
    return {name: np.asarray(x, np.float32) for name, x in flat.items()}


class Learner:
  """A learner around a loop of yours; a context.

      with diloco.Learner(address, params, opt_state, learner=0, sync=sync,
                          workdir='runs/mine') as learner:
        params, opt_state = learner.start()
        for batch in batches_from(learner.position):
          params, opt_state, loss = my_step(params, opt_state, batch)
          params, opt_state = learner.boundary(
            params, opt_state, tokens=n, loss=loss)
          if learner.done:
            break

  With `overlap_steps` > 0, the default, nothing here waits for another process
  once `start` has returned. The loss of a step is read at the next boundary, so
  that the devices always have a step queued. SIGTERM and SIGINT make it leave
  in good order, with a checkpoint, at the next boundary.

  A learner of several hosts has one of these in each process; all make the
  same calls, with the tokens, rows and loss of all. A host that is gone ends
  the others: start all of them again. `transport.host` in `sync.config` is the
  address by which a host's peers reach it.

  Args:
    syncer: host:port.
    params: pytree of `jax.Array`s in f32, bf16 or f16; all on one device, or
      with a `NamedSharding` on one mesh: that of all processes, where
      `jax.distributed` has several. It belongs to the learner from now on.
    opt_state: pytree of arrays that is only carried: saved, and given to a
      learner that comes back. What lies with a parameter has its path at the
      end of its own, as optax's states do. Of typed keys it has the key data.
    learner: the learner id, from 0.
    sync: the same in all processes of the run.
    workdir: folder of the run; checkpoints, metrics and events of this learner
      are written there.
    notice_s: how long leaving in good order may take.
    access: files of credentials, such as {'token_file': 'token'}, where the
      syncer asks for them; see docs/security.md.

  Attributes:
    done: True once the run is over, or this learner was told to stop.
    position: rows of its data that this learner has taken, of all its
      processes; where the next batch begins.
    step: steps that it has made.

  Raises:
    ConfigError: arguments can't be used; it says which and why.
  """

  def __init__(
    self,
    syncer: str,
    params: Any,
    opt_state: Any = (),
    *,
    learner: int,
    sync: Sync,
    workdir: str | os.PathLike,
    notice_s: float = NOTICE_S,
    access: Mapping[str, str] = {},
  ):
    self._tree = Tree(params, sync.roles)
    config = sync.run_config()
    run_config.check_learner(config, learner)
    run_spec = make_run_spec(config, given_model(self._tree.table))
    self._run_spec = run_spec
    self.done = False
    self._started = False
    self._at = host_messages.Proceed(0, 0, 0)  # Of a host that follows.
    folder = Workdir(
      pathlib.Path(workdir).absolute(), folder_at(config.checkpoint.folder)
    )
    name = learner_name(learner)
    transport = config.transport
    credentials = open_access(
      access, transport, None, insecure=False, transfer_fenced=False
    )
    self._programs = GivenPrograms(run_spec, self._tree.flat(params), opt_state)
    self._plane = make_plane(transport.data_plane, transport.host, credentials)
    records = LearnerRecords(
      folder.checkpoints(name),
      learner,
      run_spec.fingerprints,
      config.checkpoint.keep_latest,
      say=logging.warning,
    )
    hosts = meet(transport.host, self._on_lost)
    self._leads = isinstance(hosts, HostGroup)
    if not self._leads:
      self._follower = Follower(
        jax.process_index(),
        hosts,
        run_spec,
        self._programs,
        records,
        self._plane,
        folder,
        lambda restored: TrainState(
          run_spec, self._programs, restored, records
        ),
      )
      self._state = self._follower.state
      return
    self._hosts = hosts
    started, _ = restore.started_with(jax.process_index(), records, None)
    source = hosts.agree(started)
    restored = restore.restore(run_spec, self._programs, records, source)
    self._state = TrainState(run_spec, self._programs, restored, records)
    self._client = SyncerClient(
      run_spec,
      learner,
      SyncerAddress(syncer, self._plane, credentials, folder.summary.exists),
      self._programs,
      restored.host,
      restored.start,
      hosts=hosts,
      workdir=folder,
    )
    hparams = run_config.flat(config)
    self._writer = process_writer(folder, name, hparams)
    self._tape = LearnerEventLog(
      folder.learner_tape(learner),
      lambda: self._client.process,
      describe(config, os.environ),
    )
    self._boundaries = Boundaries(
      run_spec,
      learner,
      self._state,
      restored,
      self._client,
      records,
      self._writer,
      self._tape,
      notice_s,
      hosts,
    )
    hosts.watch(on_stop=self._boundaries.stop, on_lost=self._client.crash)

  def __enter__(self) -> 'Learner':
    self._handlers = {}
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._handlers[number] = signal.signal(number, self._on_signal)
    return self

  def __exit__(self, kind, error, trace):
    ends = kind is None and self._started and not self.done
    if ends and self._leads:
      self._boundaries.abandon('its loop ended')
      self._end_all(0, 'its loop ended')
    elif ends:
      self._follow()
    for number, handler in self._handlers.items():
      signal.signal(number, handler)
    if self._leads:
      self._client.close()
      self._hosts.close()
      self._writer.close()
      self._tape.close()
    else:
      self._follower.close()
    self._plane.close()

  def start(self) -> tuple[Any, Any]:
    """Connects; returns the parameters and optimizer state to begin with.

    They are those of this learner's newest checkpoint, or of a peer if the run
    is ahead of it, or what it was given.

    Raises:
      ConfigError: the syncer refuses this learner for good.
      SyncerAbsent: there is no syncer.
    """
    if self._leads:
      self._lead(self._boundaries.begin)
    else:
      self._follow()
    self._started = True
    self._programs.given = None
    return self._result()

  def boundary(
    self, params: Any, opt_state: Any, *, tokens: int, loss: Any, rows: int = 1
  ) -> tuple[Any, Any]:
    """Exchanges what is due after a step; returns what to go on with.

    It is called after each step, whose results need not be ready. Arrays that
    it was given must not be used any more: those of a fragment that has arrived
    are overwritten.

    Args:
      params: as the step left them.
      opt_state: as the step left it.
      tokens: that the loss of the step counts, so that masked ones weigh
        nothing: the weight of this learner's work.
      loss: scalar.
      rows: by which `position` moves on.

    Raises:
      ValueError: another tree, shape, dtype or sharding than at the start, or
        `tokens` or `rows` is no such number.
      RunOver: the run is over, see `done`.
      RuntimeError: `start` was not called, or the learner had to leave, such as
        for a loss that is not finite.
    """
    if self.done:
      raise RunOver('the run is over: end the loop once learner.done is True')
    if not self._started:
      raise RuntimeError('boundary: learner.start() comes first')
    for name, value, least in ('tokens', tokens, 1), ('rows', rows, 0):
      if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(
          f'{name}={value!r}: must be an integer, {least} or more'
        )
    flat = self._tree.flat(params)
    self._programs.check(flat)
    self._state.params, self._state.inner_state = flat, opt_state
    if not self._leads:
      self._follow()
      return self._result()
    global_step = self._client.global_step
    self._tape.progress(global_step)

    def exchange() -> bool:
      done = {'loss': loss}, int(rows), int(tokens), global_step
      self._boundaries.after_step(*done)
      return self._boundaries.goes_on()

    self._lead(exchange)
    return self._result()

  @property
  def position(self) -> int:
    return self._boundaries.rows if self._leads else self._at.rows

  @property
  def step(self) -> int:
    return self._boundaries.step if self._leads else self._at.step

  @property
  def global_step(self) -> int:
    """t of the run, such as for a schedule."""
    return self._client.global_step if self._leads else self._at.global_step

  def stop(self):
    """Leaves in good order, at the next boundary; signal-safe."""
    (self._boundaries if self._leads else self._follower).stop()

  def parameters(self) -> Any:
    """Returns Θ as this learner last received it: a pytree of f32 arrays on the
    host. Once the run is over that is what the run has trained.

    Raises:
      RuntimeError: the learner has several hosts, each of which has a part.
    """
    if jax.process_count() > 1:
      raise RuntimeError(
        'each host has a part of Θ: read parameters/ of the workdir, once the '
        'run is over'
      )
    run_spec, held = self._run_spec, self._state.host.held()
    theta = {
      path: np.empty(spec.shape, np.float32)
      for path, spec in run_spec.specs.items()
    }
    for replica, pieces in zip(held, run_spec.layout.fragments):
      theta = fragments.put(theta, pieces, replica.theta)
    return self._tree.nested(theta)

  def _on_signal(self, number, frame):
    signal.signal(number, signal.SIG_DFL)  # A second one ends at once.
    self.stop()

  def _result(self) -> tuple[Any, Any]:
    return self._tree.nested(self._state.params), self._state.inner_state

  def _lead(self, work: Callable[[], bool]):
    """Works at a boundary; tells the other hosts what comes after it.

    Args:
      work: returns whether another step follows.
    """
    try:
      if work():
        if self._hosts.count > 1:
          at = self.position, self.step, self.global_step
          self._hosts.tell(host_messages.Proceed(*at))
        return
      left = self._boundaries.finish()
    except RunIsOver as over:
      self._end_all(0, str(over))
      self.done = True
      return
    if left.refused:
      reason = f'the syncer refused: {left.reason}'
      self._end_all(REFUSED, reason)
      raise ConfigError(reason)
    if not (left.done or left.stopped):
      reason = f'learner left: {left.reason}'
      self._end_all(FAILED, reason)
      raise RuntimeError(reason)
    self._end_all(0, left.reason)
    self.done = True

  def _end_all(self, code: int, reason: str):
    self._hosts.tell(host_messages.EndAt(code, reason))

  def _follow(self):
    """Performs what host 0 does at this boundary."""
    order = self._follower.until_step()
    if isinstance(order, host_messages.Proceed):
      self._at = order
      return
    self.done = True
    if order.code == REFUSED:
      raise ConfigError(order.reason)
    if order.code:
      raise RuntimeError(order.reason)

  def _on_lost(self, error: GroupLost):
    """Ends the process: a collective may wait for the lost host forever."""
    logging.error('another host is gone: %s', error)
    os._exit(1)


class GivenPrograms(ExchangePrograms):
  """The programs of the exchange for arrays that a loop of the user's has.

  Args:
    params: path -> array.
    opt_state: pytree of arrays.
  """

  def __init__(
    self, run_spec: RunSpec, params: Mapping[str, jax.Array], opt_state: Any
  ):
    mesh = _mesh_of(params)
    self._seen = {}  # path -> sharding that was found to be the same.
    super().__init__(
      run_spec,
      mesh,
      {
        path: like(x.shape, _on(mesh, x, path), x.dtype)
        for path, x in params.items()
      },
    )
    opt_state = jax.tree.map(jnp.asarray, opt_state)
    _refuse_keys(opt_state)
    self.given = dict(params), opt_state
    state_like = jax.tree_util.tree_map_with_path(
      lambda path, x: like(x.shape, self._state_place(path, x), x.dtype),
      opt_state,
    )
    self.set_state_like(state_like)
    self.compile_exchange()

  def check(self, params: Mapping[str, jax.Array]):
    """Raises ValueError unless the arrays are like those of the start."""
    for path, x in params.items():
      wanted, seen = self.params_like[path], self._seen.get(path)
      if x.shape != wanted.shape or x.dtype != wanted.dtype:
        raise ValueError(
          f'{path} is {_described(x)}, it was {_described(wanted)} at the start'
        )
      if x.sharding is seen:  # As of most steps: the comparison takes 10 µs.
        continue
      if not x.sharding.is_equivalent_to(wanted.sharding, x.ndim):
        raise ValueError(
          f'{path} is sharded as {x.sharding}, it was {wanted.sharding} at the '
          'start: give jit the shardings of the parameters as out_shardings'
        )
      self._seen[path] = x.sharding

  def zeros(self, like):
    del like  # What was given: it will be overwritten.
    return self.given[0]

  def draw(self, zeros):
    del zeros
    return self.given

  def fresh_state(self, params):
    del params
    return self.given[1]

  def copy_state(self, state):
    return jax.tree.map(_copy_to_host, state)

  def compile_copy_all(self):
    """Sets the copy of all: array by array, as those of a state lie anyhow."""
    self._copy_all = lambda arrays: jax.tree.map(jnp.copy, arrays)

  def _has_room(self) -> bool:
    # Of the loop's step only the most that it has taken is known.
    device = self._mesh.local_devices[0]
    known = device.memory_stats()
    if not known:
      return True  # Of the CPU: a copy lies in the host's memory anyhow.
    copied = sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves((self.params_like, self.state_like))
    )
    return known['peak_bytes_in_use'] + copied <= ROOM * known['bytes_limit']

  def _state_place(self, path, x: jax.Array) -> NamedSharding:
    name = self._param_of(path, x.shape)
    if name is not None:
      return self.params_like[name].sharding
    return _everywhere(self._mesh)


def _refuse_keys(opt_state: Any):
  """Raises ConfigError where a leaf is a typed key, which no file holds."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(opt_state)
  problems = [
    f'opt_state: {jax.tree_util.keystr(path, simple=True, separator="/")} is '
    f'{_described(x)}, must be numbers: jax.random.key_data gives those of a '
    'key, wrap_key_data the key again'
    for path, x in leaves
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  ]
  if problems:
    raise ConfigError(problems)


def _copy_to_host(x: jax.Array) -> jax.Array:
  copied = jnp.copy(x)
  copied.copy_to_host_async()
  return copied


def _mesh_of(params: Mapping[str, jax.Array]) -> Mesh:
  """Returns the mesh on which all parameters lie.

  Raises:
    ConfigError: there are several.
  """
  meshes = {}
  for path, x in params.items():
    where = getattr(x, 'sharding', None)
    if where is None:
      raise ConfigError(
        f'params: {path} is {_described(x)}, must be a jax.Array'
      )
    if isinstance(where, NamedSharding):
      meshes.setdefault(where.mesh, path)
    elif len(where.device_set) == 1:
      [device] = where.device_set
      meshes.setdefault(Mesh(np.array([device]), ('device',)), path)
    else:
      raise ConfigError(
        f'params: {path} is sharded as {where}, must have a NamedSharding'
      )
  if len(meshes) > 1:
    raise ConfigError(
      f'params: {" and ".join(meshes.values())} lie on unlike meshes, '
      f'{" and ".join(map(str, meshes))}'
    )
  return next(iter(meshes))


def _everywhere(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def _on(mesh: Mesh, x: jax.Array, path: str) -> NamedSharding:
  if isinstance(x.sharding, NamedSharding):
    return x.sharding
  return _everywhere(mesh)


def _described(x: Any) -> str:
  if not hasattr(x, 'dtype'):
    return f'a {type(x).__name__}'
  return f'{x.dtype}{list(x.shape)}'
