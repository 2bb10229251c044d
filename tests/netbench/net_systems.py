# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared: their processes, and what is predicted."""

import copy
import dataclasses
import sys
from collections.abc import Mapping, Sequence

from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.fleets import fleet, traffic
from diloco.fleets.failures import FaultEvents
from diloco.metrics.workdir import Workdir, learner_name
from diloco.numerics.codec import bytes_per_value
from diloco.simulator.network import Network
from launch.program import Processes, Role, program
from tests.netbench.links import Loopback, ShapedLinks

SYNCER = 'syncer'
LEAVE_S = 2.0  # Nothing of these runs is worth saving.
LAYERS = 10  # Of the quadratic model.
ENDLESS_STEPS = 10**8
NEVER_STEPS = 8 * 10**6  # H without syncs; P divides it.
# Of a frame of Ethernet with 1,500 bytes, what TCP with time stamps carries.
PAYLOAD = 1448 / 1514
PREDICTED_CYCLES = 12
TOKENS = 8  # Of a step; they decide nothing.


@dataclasses.dataclass(frozen=True)
class Setting:
  """The model, the learners and the step that all systems of a table share.

  Attributes:
    learners: M, or workers of the data-parallel computation.
    millions: parameters, as asked for.
    step_s: T, which is slept.
    slowness: factors on T, of all learners that there may ever be, by id;
      empty: M learners, all alike.
    delay_ms: what a packet takes from one member to another on an empty link.
  """

  learners: int
  millions: float
  step_s: float
  slowness: tuple[float, ...] = ()
  delay_ms: float = 0.0

  @property
  def width(self) -> int:
    return max(1, round((1e6 * self.millions / LAYERS) ** 0.5))

  @property
  def params(self) -> int:
    """The parameters, exactly."""
    return LAYERS * self.width**2

  @property
  def members(self) -> list[str]:
    """The names of learners or workers."""
    return [learner_name(m) for m in range(len(self.slowness) or self.learners)]

  @property
  def steps_s(self) -> tuple[float, ...]:
    """T of each learner."""
    return tuple(self.step_s * x for x in self.slowness) or (
      (self.step_s,) * self.learners
    )

  @property
  def linked(self) -> list[str]:
    """The names of all that have a link."""
    return [SYNCER, *self.members]


@dataclasses.dataclass(frozen=True)
class NetPrediction:
  """The prediction for one system over links of one rate.

  Attributes:
    utilisation: step time without a network over that with it.
    pace: rounds closed per round that steps make due; None: no rounds.
    sent_bytes: what a member sends per step.
  """

  utilisation: float
  pace: float | None
  sent_bytes: float


@dataclasses.dataclass(frozen=True)
class NetSystem:
  """A way to train over links.

  Attributes:
    title: its name in the tables.
    settings: keys of the configuration that make it; None: it is
      data-parallel, without a syncer.
    waits: True if learners wait for what they exchange.
  """

  title: str
  settings: Mapping[str, object] | None
  waits: bool = False

  @property
  def has_syncer(self) -> bool:
    return self.settings is not None

  def period(self, setting: Setting) -> int:
    """Returns the steps after which its traffic repeats itself."""
    protocol = self.config(setting).protocol
    return protocol.sync_every_steps if self.has_syncer else 1

  def config(self, setting: Setting, alone: bool = False) -> RunConfig:
    """Returns the configuration of its run; `alone`: no round becomes due."""
    made = copy.deepcopy(run_config.defaults())
    for key, value in self._keys(setting, alone).items():
      section, _, name = key.partition('.')
      made[section][name] = value
    return run_config.build(made)

  def roles(
    self,
    setting: Setting,
    links: ShapedLinks | Loopback,
    workdir: Workdir,
    alone: bool = False,
  ) -> tuple[list[Role], dict[str, str]]:
    """Returns its processes, each in its namespace, and their environment.

    Those of learners that come later are among them.

    Args:
      alone: the members exchange nothing.
    """
    config = self.config(setting, alone)
    keys = self._keys(setting, alone) if self.has_syncer else {}
    address = f'{links.address(SYNCER)}:{links.port}'
    made = program(
      config,
      [f'--config.{key}={value}' for key, value in keys.items()],
      workdir,
      address,
      learners=[Processes()] * len(setting.members),
    )
    if self.has_syncer:
      floors = dict(zip(setting.members, setting.steps_s))
      roles = [_open_role(role, links, floors) for role in made.roles]
    else:
      roles = _workers(setting, links, workdir, alone)
    placed = [
      dataclasses.replace(
        role, argv=(*links.inside(role.name), *role.argv), leave_s=LEAVE_S
      )
      for role in roles
    ]
    return placed, {**dict(made.environment), 'JAX_PLATFORMS': 'cpu'}

  def predict(
    self, setting: Setting, mbits: float, step_s: float
  ) -> NetPrediction:
    """Returns the prediction for links of this rate.

    Args:
      step_s: of a step without a network.
    """
    bps = 1e6 * PAYLOAD * mbits
    if self.has_syncer:
      return _simulated(self.config(setting), setting, bps, step_s)
    nbytes = 4 * setting.params * traffic.all_reduce_share(setting.learners)
    # A ring: each part of the gradient goes round twice, but for one member.
    delays_s = 2 * (setting.learners - 1) * setting.delay_ms / 1e3
    # One bucket, ready when the step is: nothing overlaps.
    burst_s = step_s + 8 * nbytes / bps + delays_s
    return NetPrediction(step_s / burst_s, None, nbytes / PAYLOAD)

  def _keys(self, setting: Setting, alone: bool) -> dict[str, object]:
    """Returns the keys of the configuration that differ from the defaults."""
    keys = {
      'model.kind': 'bowl',
      'model.layers': LAYERS,
      'model.d_model': setting.width,
      'model.d_ff': setting.width,
      'data.source': 'grammar',
      'data.seq_len': TOKENS,
      'data.batch': 1,
      'data.grammar_bytes': 1 << 16,
      'data.shards': len(setting.members),
      'inner.optimizer': 'sgd',
      'inner.lr': 0.02,
      'inner.schedule': 'constant',
      'protocol.learners': setting.learners,
      'protocol.total_steps': ENDLESS_STEPS,
      'transport.data_plane': 'grpc',
      'checkpoint.learner_every_steps': 0,
      'checkpoint.syncer_every_rounds': 10**6,
      'run.log_every_steps': 1,
      'run.cpu_threads': 1,
      'run.step_floor_s': setting.step_s,
    } | dict(self.settings or {})
    if alone:
      keys['protocol.sync_every_steps'] = NEVER_STEPS
    return keys


def _codec(name: str) -> dict[str, object]:
  return {'codec.up': name, 'codec.down': name}


# All learners are waited for, and all wait.
IN_STEP = {'protocol.quorum': 0, 'protocol.overlap_steps': 0}
SYSTEMS = {
  'int4': NetSystem('Decoupled DiLoCo int4', _codec('int4')),
  'bf16': NetSystem('Decoupled DiLoCo bf16', _codec('bf16')),
  'f32': NetSystem('Decoupled DiLoCo f32', _codec('f32')),
  'streaming': NetSystem(
    'DiLoCo bf16 by fragments, waiting', _codec('bf16') | IN_STEP, waits=True
  ),
  'diloco': NetSystem(
    'DiLoCo bf16, waiting',
    _codec('bf16') | IN_STEP | {'protocol.fragments': 1},
    waits=True,
  ),
  'data_parallel': NetSystem('data-parallel f32', None, waits=True),
}


def _open_role(
  role: Role, links: ShapedLinks | Loopback, floors: Mapping[str, float]
) -> Role:
  """Returns a role that listens in its namespace, where all are friends."""
  own = [f'--config.transport.host={links.address(role.name)}', '--insecure']
  if role.name in floors:
    own.append(f'--config.run.step_floor_s={floors[role.name]}')
  return dataclasses.replace(role, argv=(*role.argv, *own))


def _workers(
  setting: Setting,
  links: ShapedLinks | Loopback,
  workdir: Workdir,
  alone: bool,
) -> list[Role]:
  members: Sequence[str] = setting.members
  return [
    Role(
      name,
      (
        *(
          sys.executable,
          '-m',
          f'{__package__}.all_reduce_worker',
        ),
        f'--rank={0 if alone else rank}',
        f'--world={1 if alone else len(members)}',
        f'--coordinator={links.address(members[0])}:{links.port}',
        f'--host={links.address(name)}',
        f'--values={setting.params}',
        f'--step_s={setting.step_s}',
        f'--out={workdir.metrics(name)}',
      ),
    )
    for rank, name in enumerate(members)
  ]


def network_of(config: RunConfig, params: int, bps: float) -> Network:
  """Returns learners' links of a rate, and the sizes of what they carry."""
  fragments, codec = config.protocol.fragments, config.codec

  def sizes(name: str) -> tuple[float, ...]:
    each = bytes_per_value(name, codec.block_size, codec.scale)
    return (each * params / fragments,) * fragments

  return Network(
    up_bytes=sizes(codec.up),
    down_bytes=sizes(codec.down),
    full_bytes=sizes('f32'),
    state_bytes=4.0 * params,
    learner_bps=bps,
  )


def _simulated(
  config: RunConfig, setting: Setting, bps: float, step_s: float
) -> NetPrediction:
  """Runs the protocol's own machines over such links, the syncer's too."""
  protocol, params = config.protocol, setting.params
  network = dataclasses.replace(
    network_of(config, params, bps),
    syncer_bps=bps,
    latency_s=setting.delay_ms / 1e3,
  )
  cycles_s = PREDICTED_CYCLES * protocol.sync_every_steps * step_s
  # So long that also a run that waits for most of its time makes some cycles.
  slow_s = PREDICTED_CYCLES * protocol.learners * 64 * params / bps
  machines = fleet.Fleet((step_s,) * protocol.learners, TOKENS)
  found = fleet.run(
    protocol, machines, network, FaultEvents(), 0, cycles_s + slow_s
  )
  steps = found.steps / protocol.learners
  sent = sum(
    use.mean_bps
    for use in found.links
    if (use.process, use.direction) == (0, 'out')
  )
  return NetPrediction(
    steps * step_s / found.until_s,
    found.pace if protocol.overlap_steps else None,
    sent / 8 * found.until_s / steps / PAYLOAD if steps else 0.0,
  )
