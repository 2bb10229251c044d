# SPDX-License-Identifier: Apache-2.0
"""A new choice of each kind: the edit that adds it, and its use."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Choice:
  """An edit, and the use of what it adds.

  Attributes:
    file: where the registry is.
    registry: its name.
    entry: what is added to it.
    before: the implementation, which stands before the registry.
    use: a program that uses the new entry.
    also: file, registry and entry of a second edit.
  """

  file: str
  registry: str
  entry: str
  before: str
  use: str
  also: tuple[str, str, str] | None = None


ENDS = """
from diloco.simulator.cluster import Cluster
from diloco.simulator.timing import Timing
config = built(protocol__{}, protocol__total_steps=96)
cluster = Cluster(config.protocol, Timing(dict.fromkeys((0, 1), 1.0)), seed=0)
[cluster.start(learner) for learner in (0, 1)]
cluster.run(2000.0)
assert cluster.ended is not None
"""
GOODPUT = """
from diloco.config import simulation
from diloco.studies import goodput
from experiments import simulated
config = simulated.base('goodput')
config.study.update(chips=(150_000,), learners=(2,), learner_hours=0.1, seeds=1)
"""
CHOICES = {
  'merge rule': Choice(
    'diloco/numerics/merge.py',
    'RULES',
    "'median': Rule(median),",
    """
def median(vs, weights):
  return np.median(np.stack(vs), axis=0)
""",
    """
from types import SimpleNamespace
from diloco.numerics import merge
config = built(merge__rule='median')
vs = {m: {'w': np.full(3, v)} for m, v in enumerate((1.0, 2.0, 9.0))}
pieces = [SimpleNamespace(name='w', role='plain')]
merged = merge.merge(vs, dict.fromkeys(vs, 1.0), pieces, config.merge.rule)
assert merged['w'].tolist() == [2.0] * 3
""",
  ),
  'codec': Choice(
    'diloco/numerics/codec.py',
    'CODECS',
    "'f16': CodecKind(16, lambda block_size, scale: Float16Codec()),",
    """
class Float16Codec:
  name, block_values = 'f16', 1

  def nbytes(self, n):
    return 2 * n

  def encode(self, x, rng=None):
    return x.astype('<f2').view(np.uint8)

  def decode(self, data, n):
    return data.view('<f2').astype(np.float32)
""",
    """
from diloco.fleets import traffic
from diloco.numerics.codec import make_codec
config = built(codec__up='f16', codec__down='f16')
codec = make_codec(config.codec.up)
x = np.float32([0.5, -2.0])
assert codec.decode(codec.encode(x), 2).tolist() == [0.5, -2.0]
assert traffic.bytes_per_value(config.codec.up) == 2.0
""",
  ),
  'type of scales': Choice(
    'diloco/numerics/block_codec.py',
    'SCALES',
    "'f64': Scale('<f8', np.float64, np.float32),",
    '',
    """
from diloco.numerics.codec import make_codec
section = built(codec__scale='f64').codec
codec = make_codec(section.up, section.block_size, section.scale)
assert codec.nbytes(128) == 64 + 8
x = np.arange(-64, 64, dtype=np.float32)
near = codec.decode(codec.encode(x), 128)
assert near.dtype == np.float32 and np.abs(near - x).max() < 5
""",
  ),
  'data plane': Choice(
    'diloco/transport/planes.py',
    'PLANES',
    "'post': PlaneKind(_post, encrypted=True, authenticated=True),",
    """
def _post(host, access, workers_max):
  return _memory(host, access, workers_max)
""",
    """
from diloco.run.exposure import open_access
from diloco.transport import auth, planes
config = built(transport__data_plane='post', transport__host='192.0.2.1')
plane = planes.make_plane('post', config.transport.host)
plane.publisher('syncer').offer(1, np.zeros(4, np.uint8))
files = vars(auth.AccessFiles())
try:
  open_access(files, config.transport, None, False, True)
  raise AssertionError('strangers let in')
except ValueError as error:  # As it is authenticated, it asks for a token.
  assert '--token_file' in str(error), error
assert planes.GUARDED == ('post', 'grpc')
""",
  ),
  'metric of a run': Choice(
    'diloco/metrics/figures.py',
    'RUN',
    "_entry('seconds', 'time', 's', 'Since 1970.', 'seconds',"
    " value=_field('time_s'), curve='run/time', shown='end page'),",
    '',
    """
from diloco.metrics import figures, status
from diloco.monitoring import run_metrics
told = status.RunStatus(run='run', step=0, learners=(), time_s=7.0)
assert figures.curves(told)['run/time'] == 7.0
assert status.as_json(told)['seconds'] == 7.0
assert figures.texts(figures.RUN, told, 'page')[-1]['text'] == '7'
assert 'diloco_seconds{run="run"} 7.0' in run_metrics.text(told)
""",
  ),
  'weighting': Choice(
    'diloco/protocol/weights.py',
    'WEIGHTS',
    "'steps': step_weight,",
    """
def step_weight(c_tokens, c_steps):
  return float(c_steps)
""",
    ENDS.format("weighting='steps'"),
  ),
  'admission': Choice(
    'diloco/protocol/config.py',
    'ADMISSIONS',
    "'strict': Admission(True),",
    '',
    ENDS.format("admission='strict'"),
  ),
  'inner optimizer': Choice(
    'diloco/numerics/optimizers.py',
    'INNER',
    "'lion': _lion,",
    """
def _lion(settings):
  import optax
  return optax.scale_by_lion(b1=settings.b1, b2=settings.b2)
""",
    """
from diloco.numerics.inner import make_inner
inner = built(inner__optimizer='lion').inner
made = make_inner(inner.optimizer, inner.b1, inner.b2)
params = {'w': np.ones(3, np.float32)}
update, _ = made.update(params, made.init(params), params)
assert np.asarray(update['w']).tolist() == [1.0] * 3
""",
  ),
  'outer optimizer': Choice(
    'diloco/numerics/optimizers.py',
    'OUTER',
    "'signs': OuterKind(_signs, moments=0),",
    """
def _signs(settings, anneal):
  import numpy as np
  import optax
  return optax.stateless(
    lambda delta, _: {n: -settings.lr * np.sign(x) for n, x in delta.items()}
  )
""",
    """
from diloco.run.spec import make_run_spec
from diloco.syncer.outer_state import OuterState
keys = {'model__layers': 1, 'protocol__fragments': 1, 'codec__down': 'f32'}
keys |= {'outer__optimizer': 'signs', 'outer__anneal_fraction': 0.0}
state = OuterState(make_run_spec(built(data__source='grammar', **keys)))
before = state.state(0).theta
ones = {name: np.ones_like(v) for name, v in before.items()}
state.install(0, state.outer_step(0, {0: ones}, {0: 1.0}))
for name, v in state.state(0).theta.items():
  assert (v == before[name] + np.float32(-0.6)).all(), name
""",
  ),
  'schedule of the inner rate': Choice(
    'diloco/numerics/schedule.py',
    'SCHEDULES',
    "'squared': Schedule(lambda progress: (1 - progress) ** 2),",
    '',
    """
from diloco.numerics.schedule import make_schedule
inner = built(inner__schedule='squared').inner
rate = make_schedule(inner.schedule, 1.0, 0, 100)
assert [rate(t) for t in (0, 50, 100)] == [1.0, 0.25, 0.0]
""",
  ),
  'fragmentation scheme': Choice(
    'diloco/numerics/fragments.py',
    'SCHEMES',
    "'first': lambda bins, tensors: bins[0].extend(tensors),",
    '',
    """
from diloco.numerics.fragments import TensorSpec, make_layout
fragments = built(fragments__scheme='first').fragments
specs = {'e': TensorSpec((4, 2), 'embedding'), 'w': TensorSpec((3,))}
layout = make_layout(specs, fragments.scheme, 2, fragments.embedding)
assert layout.sizes == (7, 4)
""",
  ),
  'place of embeddings': Choice(
    'diloco/numerics/fragments.py',
    'EMBEDDINGS',
    "'first': Embedding(_first),",
    """
def _first(tables, fragments):
  return [], [list(tables), *([] for _ in range(fragments - 1))]
""",
    """
from diloco.numerics.fragments import TensorSpec, make_layout
config = built(fragments__embedding='first', merge__embedding='rda')
specs = {'e': TensorSpec((4, 2), 'embedding'), 'w': TensorSpec((3,))}
layout = make_layout(specs, 'balanced', 2, config.fragments.embedding)
assert layout.sizes == (8, 3)
""",
  ),
  'kind of models': Choice(
    'diloco/models/kinds.py',
    'KINDS',
    "'line': ModelKind(_line, fixed={'tied': False}),",
    """
def _line(section):
  import jax.numpy as jnp
  from diloco.models.api import plain_model
  return plain_model(
    lambda key: {'w': jnp.zeros(section.d_model)},
    lambda params, batch, key: (jnp.sum(params['w'] ** 2), {}),
  )
""",
    """
from diloco.config.sections import ConfigError
from diloco.run.spec import make_run_spec
keys = {'data__source': 'grammar', 'protocol__fragments': 1}
keys |= {'model__kind': 'line', 'fragments__embedding': 'split'}
assert make_run_spec(built(**keys)).parameters == 128
try:
  built(model__tied=True, **keys)
  raise AssertionError('tied')
except ConfigError as error:
  assert "kind='line' knows only False" in str(error), error
""",
  ),
  'system of the lab': Choice(
    'diloco/lab/lab_systems.py',
    'SYSTEMS',
    "'lonely': LabSystem(_data_parallel, is_elastic=True, is_alone=True),",
    '',
    """
from diloco.lab.run import train
from diloco.run.spec import make_run_spec
config = common.quicktest(common.base())
config.model.update(kind='bowl', layers=2)
config.protocol.total_steps = 5
config.inner.warmup_steps = 2
config.lab.system = 'lonely'
trained = train(make_run_spec(run_config.build(config)))
assert trained.points[-1].step == 5
""",
  ),
  'blend rule': Choice(
    'diloco/numerics/blend.py',
    'RULES',
    "'halve': BlendRule(lambda _: _halve),",
    """
def _halve(theta, new, since):
  return mix(theta, new, 0.5)
""",
    """
from diloco.numerics.blend import make_blend
config = built(protocol__blend='halve')
blend = make_blend(config.protocol.blend, config.blend_alpha)
mixed = blend({'w': np.zeros(2)}, {'w': np.ones(2)}, {})
assert mixed['w'].tolist() == [0.5, 0.5]
""",
    also=('diloco/protocol/config.py', 'BLENDS', "'halve': Blending(),"),
  ),
  'text source in memory': Choice(
    'diloco/data/sources.py',
    'IN_MEMORY',
    "'zeros': MemorySource(_zeros, vocab_min=1),",
    """
def _zeros(data, seed):
  from diloco.data import corpus
  return corpus.make_corpus('zeros', bytes(1 << 16), bytes(1 << 12))
""",
    """
from diloco.run.spec import load_text
config = built(data__source='zeros', model__vocab=2)
assert load_text(config).name == 'zeros'
""",
  ),
  'format of files of documents': Choice(
    'diloco/data/sources.py',
    'FORMATS',
    "'lines': Format(_lines, needs_text_key=False),",
    """
def _lines(path, text_key):
  return [path]
""",
    """
from diloco.data import mixture
config = built(data__source='lines', data__path='some.txt')
(item,) = config.data.items
assert mixture.FORMATS[item.format].files(item.path, '') == ['some.txt']
config = built(data__source='mix', data__mix=('1 lines a', '2 parquet b'))
assert config.data.items[0].format == 'lines'
""",
  ),
  'tokenizer': Choice(
    'diloco/data/tokenizers.py',
    'TOKENIZERS',
    "'halves': TokenizerKind(_halves),",
    """
def _halves(name, path, end):
  return dataclasses.replace(BYTES, name=name)
""",
    """
from diloco.data.tokenizers import make_tokenizer
config = built(
  data__source='parquet', data__path='x', data__tokenizer='halves:FILE'
)
assert make_tokenizer(config.data.tokenizer).name == 'halves:FILE'
""",
  ),
  'launcher back end': Choice(
    'launch/backends/registry.py',
    'BACKENDS',
    """
  'ssh': BackendKind(
    lambda given, act, say: _Ssh(say, given.ssh_user),
    tpus=False,
    flags={'ssh_user': ('', 'Of all hosts.')},
    needs=('ssh_user',),
  ),
""",
    """
class _Ssh:
  def __init__(self, say, user):
    self._say, self._user = say, user

  def start(self, whole):
    self._say(f'ssh starts {whole.name} as {self._user}')
    return 0
""",
    """
import runpy, sys
config = '--config=experiments/quickstart.py'
flags = ['--to=ssh', '--workdir=/w', '--insecure', '--accelerator=cpu']
sys.argv = ['launch.main', 'start', config, *flags, '--ssh_user=me']
try:
  runpy.run_module('launch.main', run_name='__main__', alter_sys=True)
except SystemExit as end:
  assert not end.code, end.code
""",
  ),
  'failure law': Choice(
    'diloco/fleets/failures.py',
    'REPAIRS',
    "'uniform': _uniform,",
    """
def _uniform(mean_s, shape, power):
  return lambda rng: 2 * mean_s * rng.random()
""",
    """
import random
from diloco.config import simulation
from diloco.studies import traces
from experiments import simulated
config = simulated.base('goodput')
config.failures.repair = 'uniform'
made = simulation.build(config).failures
trace = traces.drawn(made, 100_000, 0, 10_000.0)
assert trace.interruptions
assert all(0 <= i.repair_s < 2 * made.repair_s for i in trace.interruptions)
""",
  ),
  "recovery of a fleet's learner": Choice(
    'diloco/fleets/systems.py',
    'RECOVERIES',
    "'spare': Recovery(_swapped, _elastic_goodput, 'A spare slice comes.'),",
    """
def _swapped(interruptions, pause_s, until_s):
  spared = [dataclasses.replace(i, repair_s=0.0) for i in interruptions]
  return failures.elastic(spared, pause_s, until_s)
""",
    GOODPUT
    + """
config.failures.recovery = 'spare'
config.study.systems = ('synchronous DiLoCo',)
page = goodput.report(simulation.build(config), lambda line: None)
assert 'A spare slice comes.' in str(page), page
""",
  ),
  'kind of fault of a chaos run': Choice(
    'launch/chaos/faults.py',
    'KINDS',
    "'twice': Kind('two of them', Shape((LEARNER,)), _twice, is_outage=True),",
    """
def _twice(stage, fault):
  stage.pause(fault.target)
  stage.kill(fault.target)
""",
    """
from launch.chaos import fault_plan, faults
cast = fault_plan.Cast(learners=2, ids_max=2, servers=('syncer',), hosts=(1, 1))
shapes = {'twice': faults.KINDS['twice'].shape}
(plan, *_) = fault_plan.draw(0, 600.0, 60.0, shapes, cast)
assert plan.kind == 'twice' and faults.outage(plan.kind)
""",
  ),
  'system of a fleet': Choice(
    'diloco/fleets/systems.py',
    'SYSTEMS',
    "'patient DiLoCo': FleetSystem('wait'),",
    '',
    GOODPUT
    + """
config.study.systems = ('patient DiLoCo',)
cells = goodput.simulate(simulation.build(config), lambda line: None)
(cell,) = cells.values()
assert cell.system == 'patient DiLoCo' and cell.learners == 2
assert 0 < cell.mean('goodput') < 1
""",
  ),
}
