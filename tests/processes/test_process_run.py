# SPDX-License-Identifier: Apache-2.0
"""Whole runs by the launcher, and a run of unlike learners."""

import re
import signal

import numpy as np
import psutil
import pytest

from diloco.metrics import figures, names, recorded_run, status
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.status import read_evaluation, read_summary
from diloco.metrics.workdir import EVALUATOR
from diloco.prediction import recorded
from diloco.watch.folders import FollowedFolders
from tests.metrics import board_events, surfaces
from tests.processes.processes import SLOW, START_S, Processes
from tests.transport import credentials

pytestmark = pytest.mark.beside

FRAGMENTS = 2  # P of the tiny configuration.


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
  """A run to its end, in which learner 1 is killed and comes back."""
  with _launched(
    tmp_path_factory.mktemp('killed'),
    'protocol.total_steps=340',
    'run.step_floor_s=0.2',  # It lasts until learner 1 is there again.
    "faults=('kill learner 1 at 0.1',)",
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


@pytest.fixture(
  params=['killed', pytest.param('over_grpc', marks=pytest.mark.soak)]
)
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


def test_every_surface_has_one_number_a_name(killed):
  """Terminal, page, `/metrics`, TensorBoard, W&B and JSON of one run."""
  (launcher,) = (x for x in killed.running if x.name == 'launcher')
  found = surfaces.shown(killed.workdir)
  assert all(len(numbers) >= 9 for numbers in found.values()), found
  told = status.of_run(killed.workdir)
  assert not surfaces.differing(told, found, launcher.output, MEASURED_AGAIN)


def test_the_live_headline_and_the_end_table_have_one_clock(killed):
  (launcher,) = (x for x in killed.running if x.name == 'launcher')
  elapsed = figures.named('elapsed_s').text_in(status.of_run(killed.workdir))
  *_, last = re.findall(r' rounds \d+  (\d+:\d\d)', launcher.output)
  assert last == elapsed


def test_the_loss_of_the_model_is_a_curve_while_the_run_goes_on(killed):
  """On the terminal, the page and the board; the evaluator ends the run."""
  (launcher,) = (x for x in killed.running if x.name == 'launcher')
  on_terminal = set(re.findall(r'Θ \d\.\d+ at step \d+', launcher.output))
  assert len(on_terminal) >= 3
  losses = [
    value.simple_value
    for path in killed.workdir.tensorboard(EVALUATOR).glob('events*')
    for event in board_events.read(path)
    for value in event.summary.value
    if value.tag == names.EVAL_LOSS
  ]
  assert len(losses) >= 3
  page = FollowedFolders([killed.workdir.root]).page()
  (chart,) = (x for x in page.parts if x.name == 'loss')
  assert chart.lines[0].kind == 'validation'
  assert set(losses) <= {np.float32(y) for y in chart.lines[0].ys}
  started = {line['process'] for line in read_jsonl(killed.workdir.events)}
  assert EVALUATOR in started
  assert 'evaluate' not in started, 'what one process has read is read again'


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


@pytest.mark.soak
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
      lambda: len(processes.tape('ready')) == 2, START_S, 'learner 1 is ready'
    )
    four.send(signal.SIGCONT)
    codes = [processes.exit_code(each) for each in (syncer, four, one)]
    assert codes == [0, 0, 0], processes.tails()
    both = [line for line in processes.merged(0) if len(line['shares']) == 2]
    assert both, 'no round merged both learners'
