# SPDX-License-Identifier: Apache-2.0
"""Whole runs by the launcher, and a run of unlike learners."""

import csv
import json
import re
import signal

import psutil
import pytest

from diloco.metrics import figures, names, recorded_run, status
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.status import read_evaluation, read_summary
from diloco.metrics.workdir import EVALUATOR, SYNCER
from diloco.monitoring import run_metrics
from diloco.prediction import recorded
from tests.metrics import board_events
from tests.processes.processes import SLOW, START_S, Processes
from tests.transport import credentials

pytestmark = pytest.mark.beside

FRAGMENTS = 2  # P of the tiny configuration.


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
  """A run to its end, in which learner 1 is killed and comes back."""
  with _launched(
    tmp_path_factory.mktemp('killed'),
    'protocol.total_steps=300',
    'run.step_floor_s=0.2',  # It lasts until learner 1 is there again.
    "faults=('kill learner 1 at 0.2',)",
    'protocol.patience=6.0',
    'run.eval_every_rounds=16',
  ) as processes:
    yield processes


@pytest.fixture(scope='module')
def over_grpc(tmp_path_factory):
  """A shorter run over gRPC alone, under mTLS and with a token."""
  folder = credentials.copied(tmp_path_factory.mktemp('access'))
  with _launched(
    tmp_path_factory.mktemp('over_grpc'),
    'protocol.total_steps=200',
    'run.step_floor_s=0.1',
    'transport.data_plane=grpc',
    flags=(
      f'--tls_ca={folder}/ca.pem',
      f'--tls_cert={folder}/run.pem',
      f'--tls_key={folder}/run.key',
      f'--tls_name={credentials.NAME}',
      f'--token_file={folder}/run.token',
    ),
  ) as processes:
    yield processes


@pytest.fixture(params=['killed', 'over_grpc'])
def run(request):
  return request.getfixturevalue(request.param)


def _launched(root, *overrides, flags=()) -> Processes:
  """Runs the launcher to its end."""
  # Not its own folder of compiled programs, but that of all tests.
  overrides = (*SLOW, 'run.compilation_cache=false', *overrides)
  with Processes(root, *overrides) as processes:
    launcher = processes.start('launcher', 'launch.local', *flags)
    code = processes.exit_code(launcher, deadline_s=2 * START_S)
  assert code == 0, f'{code=}\n{processes.tails()}'
  return processes


def test_all_learners_are_merged(run):
  """Quickstart, Done-when 1: all learners stand in the participation table."""
  summary = read_summary(run.workdir.summary)
  rounds = {each.learner: each.rounds for each in summary.learners}
  assert sorted(rounds) == [0, 1]
  assert min(rounds.values()) > 0, rounds


def test_killed_learner_comes_back(killed):
  """`launch.local` restarts what dies, and the run takes it in again."""
  summary = read_summary(killed.workdir.summary)
  assert [each.incarnations for each in summary.learners] == [1, 2]
  merged = {
    share['incarnation']
    for line in killed.merged(1)
    for share in line['shares']
    if share['learner'] == 1
  }
  assert len(merged) == 2, f'merged incarnations: {merged}'


# Files that the syncer writes at its end have the evaluator's last loss; what
# is read later, that of the final evaluation.
MEASURED_AGAIN = {'heldout_loss'}


def _surfaces(processes, folder) -> dict[str, dict[str, float]]:
  """Returns every figure that each surface shows, by name."""
  workdir = processes.workdir
  told = status.of_run(workdir)
  report = processes.start_without_config(
    'report', 'diloco.report', f'--outdir={folder}'
  )
  assert processes.exit_code(report) == 0, processes.tails()
  with (folder / 'figures.csv').open() as file:
    page = {row['figure']: row for row in csv.DictReader(file)}
  curves = {
    value.tag: value.simple_value
    for path in sorted(workdir.tensorboard(SYNCER).glob('events*'))
    for event in board_events.read(path)
    for value in event.summary.value
  }
  samples = dict(
    re.findall(
      r'^diloco_(\w+){run="[^"]*"} (\S+)$', run_metrics.text(told), re.M
    )
  )
  by_name = {
    'status.json': json.loads(workdir.status.read_text()),
    'summary.json': json.loads(workdir.summary.read_text()),
    'page': {
      x.name: page[x.label]['value, all digits']
      for x in figures.RUN
      if x.label in page
    },
    '/metrics': {
      x.name: samples[x.sample] for x in figures.RUN if x.sample in samples
    },
    'TensorBoard': {
      x.name: curves[x.curve] for x in figures.RUN if x.curve in curves
    },
  }
  names_ = {each.name for each in figures.RUN}
  return {
    surface: {
      name: float(x)
      for name, x in found.items()
      if name in names_ and x is not None
    }
    for surface, found in by_name.items()
  }


def test_every_surface_has_one_number_a_name(killed, tmp_path):
  """The terminal, the page, `/metrics`, TensorBoard and JSON of one run."""
  told = status.of_run(killed.workdir)
  own = figures.values(figures.RUN, told)
  for surface, found in _surfaces(killed, tmp_path).items():
    assert len(found) >= 9, (surface, found)
    differing = {
      name: (x, own[name])
      for name, x in found.items()
      if name not in MEASURED_AGAIN
      and x != pytest.approx(own[name], rel=1e-6)  # TensorBoard keeps f32.
    }
    assert not differing, surface
  (launcher,) = (x for x in killed.running if x.name == 'launcher')
  shown = ' '.join(launcher.output.split())
  for each in figures.shown(figures.RUN, figures.END):
    if own[each.name] is not None:
      text = ' '.join(f'{each.label} {each.of(told)}'.split())
      assert text in shown, f'{text!r} is not in the end table'


def test_all_readers_have_one_goodput(killed):
  """The page's reader and the prediction's."""
  goodput = read_summary(killed.workdir.summary).goodput
  assert 0.2 < goodput < 1.0
  assert recorded_run.read(killed.workdir.root).goodput == goodput
  assert recorded.read(killed.workdir.root).goodput == goodput


def test_loss_falls(run):
  """The global model learns: int4 both ways, on either data plane."""
  evaluation = read_evaluation(run.workdir.evaluation)
  assert evaluation.final_loss < evaluation.initial_loss


def test_plot_is_drawn(killed):
  """The run leaves a loss plot."""
  assert killed.workdir.loss_plot.stat().st_size > 0


@pytest.mark.parametrize(
  ('process', 'cards'),
  [
    ('learner-0', {names.TRAIN_LOSS, names.OF_STEP['grad_norm']}),
    ('syncer', {'run/goodput', 'run/participation', 'run/offer_age_steps'}),
    (EVALUATOR, {names.EVAL_LOSS}),
  ],
)
def test_tensorboard_has_a_card_of_each(killed, process, cards):
  found = set()
  for path in killed.workdir.tensorboard(process).glob('events*'):
    for event in board_events.read(path):
      found |= {value.tag for value in event.summary.value}
  assert cards <= found
  assert not {tag for tag in found if 'incarnation' in tag}


def test_versions_rise_by_one_per_close(run):
  """Invariant 1 of the protocol: rounds close in order, each is a version."""
  closes = run.tape('Publish')
  assert [c['round'] for c in closes] == list(range(1, len(closes) + 1))
  for p in range(FRAGMENTS):
    versions = [c['version'] for c in closes if c['fragment'] == p]
    assert versions == list(range(1, len(versions) + 1)), f'fragment {p}'


def test_no_process_is_left(run):
  """`launch.local` leaves no process behind, and says so in pids.json."""
  assert run.pids_left() == []
  started = {
    line['pid']
    for line in read_jsonl(run.workdir.events)
    if line['event'] == 'started'
  }
  folder = str(run.workdir.root)
  left = [
    process.pid
    for process in psutil.process_iter(['cmdline'])
    if any(folder in word for word in process.info['cmdline'] or ())
  ]
  assert started
  assert left == []


def test_learners_of_one_and_of_four_devices_train_together(tmp_path):
  """A learner's mesh is its own affair: it is no part of the agreement.

  The first stands still until the second is ready, or it might well finish
  the run before that has compiled its step.
  """
  overrides = (
    *SLOW,
    'model.kv_heads=2',
    'protocol.total_steps=300',  # In which the first comes back to the second.
    'protocol.patience=2.0',
  )
  with Processes(tmp_path, *overrides) as processes:
    syncer = processes.syncer()
    four = processes.learner(
      0,
      'mesh.fsdp=2',
      'mesh.tensor=2',
      environment={'JAX_NUM_CPU_DEVICES': '4'},
    )
    processes.until_merged(0)
    four.send(signal.SIGSTOP)
    one = processes.learner(1)
    processes.until(
      lambda: len(processes.tape('ready')) == 2,
      START_S,
      'learner 1 is ready',
    )
    four.send(signal.SIGCONT)
    codes = [processes.exit_code(each) for each in (syncer, four, one)]
    assert codes == [0, 0, 0], processes.tails()
    both = [line for line in processes.merged(0) if len(line['shares']) == 2]
    assert both, 'no round merged both learners'
