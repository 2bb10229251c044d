# SPDX-License-Identifier: Apache-2.0
"""The bandwidth between sites that keeps chips busy (the paper's Fig. 13)."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable

from diloco.config.simulation import SimulationConfig
from diloco.fleets import traffic
from diloco.metrics.run_progress import counted
from diloco.pages.parts import Chart, Column, Line, ReportPage, Table
from diloco.simulator.network import SYNCER
from diloco.studies import study as studies
from diloco.studies.study import Field, Record

BF16_BYTES = 2.0
FOUR_BITS_BYTES = 0.5  # As the paper counts int4: no scales.
DATA_PARALLEL = 'data-parallel bf16'
CYCLES = 10  # Simulated, of H steps each.
# What the paper prints, and for what: 5 B parameters, T = 1 s, D = 2, and, as
# we infer, 90 % utilisation with the embedding in one piece.
PAPER_GBPS = {
  DATA_PARALLEL: 104.0,
  'Decoupled DiLoCo bf16': 1.7,
  'Decoupled DiLoCo 4-bit': 0.43,
}
PAPER_UTILISATION = 0.9
PAPER_MODEL = (5e9, 0.245)  # Parameters, and the share of the embedding.
PAPER_PROTOCOL = (24, 24, 2)  # P, H, τ.
CURVE_POINTS = 120
CHART_FROM, CHART_TO = 0.2, 0.99  # Utilisations that a chart must show.


Methods = dict[str, traffic.Form]  # By the name of its row and its line.


def methods(
  config: SimulationConfig, datacentres: int, step_s: float
) -> Methods:
  """The rows of a table: systems between D data centres, at a step time.

  Data-parallel and the DiLoCos in lock-step all-reduce: f = 2(1 − 1/D) of the
  model. A learner of Decoupled DiLoCo exchanges with shards of the syncer that
  are spread over the data centres: f' = 1 − 1/D each way, on a link that takes
  both ways at once.
  """
  protocol, codec = config.protocol, config.codec
  values = config.network.params * traffic.all_reduce_share(datacentres)
  every, buckets = protocol.sync_every_steps, config.study.buckets
  embedding = config.network.embedding_share

  def bursts(every: int) -> traffic.Bursts:
    gbit = 8e-9 * values * BF16_BYTES
    return traffic.Bursts(gbit, step_s, buckets, every)

  def stream(values: float, nbytes: float, embedding: float = 0.0):
    shares = traffic.fragment_shares(protocol.fragments, embedding)
    sizes = [8e-9 * values * nbytes * share for share in shares]
    return traffic.Stream(
      sizes[0],
      sizes[-1],
      protocol.fragments,
      step_s,
      every,
      protocol.overlap_steps,
    )

  own = codec.up if codec.up == codec.down else f'{codec.up}/{codec.down}'
  own_bytes = max(map(codec.value_bytes, (codec.up, codec.down)))
  streaming, ours = 'streaming DiLoCo', 'Decoupled DiLoCo'
  return {
    DATA_PARALLEL: bursts(1),
    'DiLoCo bf16': bursts(every),
    f'{streaming} bf16': stream(values, BF16_BYTES),
    f'{streaming} 4-bit': stream(values, FOUR_BITS_BYTES),
    f'{ours} bf16': stream(values / 2, BF16_BYTES, embedding),
    f'{ours} 4-bit': stream(values / 2, FOUR_BITS_BYTES, embedding),
    f'{ours} {own}, as here': stream(values / 2, own_bytes),
  }


def report(config: SimulationConfig, say: Callable[[str], None]) -> ReportPage:
  """Returns one table and one chart per D and T, and the real machines."""
  tables, charts = [], []
  for datacentres, step_s in itertools.product(
    config.study.datacentres, config.study.steps_s
  ):
    every = methods(config, datacentres, step_s)
    tables.append(_table(config, every, datacentres, step_s))
    charts.append(
      chart(
        # Where D > 1.
        {name: form for name, form in every.items() if form.gbps(0.5) > 0},
        f'utilisation_{datacentres}_{step_s:g}',
        f'Utilisation against bandwidth, D = {datacentres}, T = {step_s:g} s',
      )
    )
  protocol, network = config.protocol, config.network
  return studies.page(
    config,
    'Bandwidth for a compute utilisation',
    (
      'The link is that of a public simulator by the first author of the '
      'paper, in closed form: first in, first out, no latency; a step of T has '
      'a third of forward and two thirds of backward, which releases '
      f'{config.study.buckets} equal buckets. Data-parallel and the DiLoCos in '
      'lock-step send 2(1 - 1/D) of the model; '
      f'DiLoCo every H = {protocol.sync_every_steps} steps; streaming one of '
      f'P = {protocol.fragments} even fragments every H/P = '
      f'{protocol.spacing_steps}, due after τ + 1 = '
      f'{protocol.overlap_steps + 1}.',
      'Decoupled DiLoCo is counted per direction, 1 - 1/D of the model: shards '
      'of the syncer are spread over the data centres, and links carry both '
      f'ways at once. The embedding, {100 * network.embedding_share:g} % of '
      'the parameters, is one fragment. That is the assumption under which '
      "the paper's 1.7 and 0.43 Gbit/s are met, at 90 %; it is our reading. "
      'In its D = 8 figures, 198 and 0.84, the utilisation is not known: 95 % '
      'fits data-parallel.',
      'The last row of each table is what this repository does: its codec with '
      'the scales of the blocks, and the embedding cut by rows over all '
      'fragments. In truth its learners do not stall: the last table has the '
      'real machines, where a narrow link costs rounds, not steps.',
    ),
    (*tables, machines(config, say), *charts),
  )


def shown(gbps: float) -> str:
  """A bandwidth as the paper's figures show it: two or three digits."""
  digits = 2 if gbps < 1 else 1 if gbps < 10 else 0
  return f'{gbps:.{digits}f}'


def _table(
  config: SimulationConfig, every: Methods, datacentres: int, step_s: float
) -> Table:
  """Each bandwidth is displayed with few digits, and in files with all."""
  network, protocol = config.network, config.protocol
  is_papers = (datacentres, step_s) == (2, 1.0) and (
    (network.params, network.embedding_share) == PAPER_MODEL
    and (protocol.fragments, protocol.sync_every_steps, protocol.overlap_steps)
    == PAPER_PROTOCOL
  )
  shares, lines = config.study.utilisations, []
  for name, form in every.items():
    lines.append((name, 'closed form', *map(form.gbps, shares)))
    if is_papers and name in PAPER_GBPS:
      papers = {PAPER_UTILISATION: PAPER_GBPS[name]}
      lines.append((name, 'paper', *map(papers.get, shares)))
  return Table(
    f'bandwidth_{datacentres}_{step_s:g}',
    f'Gbit/s for a utilisation: {network.params / 1e9:g} B parameters, '
    f'D = {datacentres}, T = {step_s:g} s',
    (
      *map(Column, ('system', 'figure')),
      *(Column(f'{100 * u:g} %', format=shown) for u in shares),
    ),
    tuple(lines),
  )


# The real protocol machines on narrow links: what suffers is the pace.


def machines(config: SimulationConfig, say: Callable[[str], None]) -> Table:
  """Pace, staleness and traffic of every codec at every bandwidth."""
  codecs = dict.fromkeys(('bf16', config.codec.up))
  cells = list(itertools.product(codecs, config.study.gbps))
  rows = []
  for codec, gbps in counted(cells, say, lambda x: f'{x[0]}, {x[1]:g} Gbit/s'):
    down = config.codec.down if codec == config.codec.up else codec
    changed = dataclasses.replace(
      config,
      codec=dataclasses.replace(config.codec, up=codec, down=down),
      network=dataclasses.replace(config.network, learner_gbps=gbps),
    )
    runs = [_run(changed, config.seed + i) for i in range(config.study.seeds)]
    rows.append(({'codec': codec, 'Gbit/s': gbps}, runs))
  return studies.table(
    'bandwidth_machines',
    f'The real machines: {config.protocol.learners} learners in '
    f'{config.network.datacentres} data centres, T = {config.fleet.step_s:g} s',
    (
      Field('codec'),
      Field('Gbit/s', digits=2),
      Field('pace %', 'pace', factor=100, spread=True),
      Field('stepping %', 'goodput', factor=100),
      Field('merged in %', 'participation', factor=100),
      Field('versions behind', 'versions_behind', 2),
      Field('mean Gbit/s', 'busiest_mean', 2),
      Field('peak Gbit/s', 'busiest_peak', 2),
    ),
    rows,
    (
      'pace: rounds closed per round that steps made due; stepping: share of '
      'the time.',
      'merged in: rounds that took a learner in, versions behind: of its base; '
      'means.',
      "mean and peak: busiest direction of a learner's link; the peak is over "
      'one step.',
      'Whoever misses an update fetches the whole fragment in f32.',
    ),
  )


def _run(config: SimulationConfig, seed: int) -> Record:
  until_s = CYCLES * config.protocol.sync_every_steps * config.fleet.step_s
  fleet = studies.decoupled(config, seed, until_s)
  used = [link for (id_, _), link in fleet.meters.items() if id_ != SYNCER]
  bits = max((link.bits_until(fleet.now_s) for link in used), default=0.0)
  return fleet.record() | {
    'versions_behind': statistics.fmean(map(fleet.staleness, fleet.learners)),
    # Of the learners' busiest link, one way; 0 where none is used.
    'busiest_mean': 1e-9 * (bits / fleet.now_s),
    'busiest_peak': 1e-9 * max((x.peak_bps for x in used), default=0.0),
  }


def chart(every: Methods, name: str, title: str) -> Chart:
  """Returns the utilisation of methods against the bandwidth."""
  lines = []
  if every:
    low = math.log(min(form.gbps(CHART_FROM) for form in every.values()))
    high = math.log(max(form.gbps(CHART_TO) for form in every.values()))
    xs = tuple(
      math.exp(low + (high - low) * i / (CURVE_POINTS - 1))
      for i in range(CURVE_POINTS)
    )
    for group, (label, form) in enumerate(every.items()):
      ys = tuple(100 * form.utilisation(gbps) for gbps in xs)
      lines.append(Line(label, 'closed form', xs, ys, group=group))
  return Chart(
    name,
    title,
    'Gbit/s between data centres',
    'compute utilisation, %',
    tuple(lines),
    log_x=True,
    y_range=(0.0, 102.0),
  )
