# SPDX-License-Identifier: Apache-2.0
"""One run of processes through every death that it must survive.

A single fixture kills and restarts in turn; each test looks at one thing that
must have come of it. The steps are short and slept out to a floor, so that
the machine is free for what starts, and the replay takes little.
"""

import re
import signal
import time

import numpy as np
import pytest

from diloco.metrics import token_ledger
from diloco.metrics.jsonl import read_jsonl
from diloco.protocol.incarnation import process_of
from tests.processes.processes import ENDLESS, START_S, Processes
from tests.survival import survival
from tests.syncer.gate import Gate

pytestmark = pytest.mark.alone

FRAGMENTS = 2  # P of the tiny configuration.
TOKENS = 4 * 32  # Of a step, likewise.
FLOOR_S = 0.04  # Of a step.
BATCH = 4  # Of `tests_tiny`.
IN_FLIGHT = 10  # Reports that a killed process may not have got rid of.
DIVERGED = 'learner-0-diverged'
CLEAN = 'learner-0-clean'
STOPPED = 128 + signal.SIGTERM

OVERRIDES = (
  *survival.BOWL,
  'data.shards=4',
  f'run.step_floor_s={FLOOR_S}',
  'protocol.patience=0.6',
  'protocol.blend=rebase',
  f'checkpoint.learner_every_steps={survival.SAVE_STEPS}',
  'checkpoint.syncer_every_rounds=1000000',  # Only when it has to.
)


@pytest.fixture(scope='module')
def survived(tmp_path_factory):
  root = tmp_path_factory.mktemp('survival')
  with Processes(root, *ENDLESS, *OVERRIDES) as processes:
    run = survival.Survived(processes)
    syncer = processes.syncer()
    learners = [processes.learner(m) for m in (0, 1)]
    survival.until_both_merged(processes)

    # One learner: it comes back through the other.
    learners[1].end()
    run.steps = processes.steps(1)[-1]['step']
    learners[1] = processes.learner(1, name='learner-1-peer')
    processes.until_merged(1)

    # The syncer: what its checkpoint lacks it gets back from the learners.
    syncer.end()
    run.started['donated'] = len(run.tape)
    syncer = processes.syncer(name='syncer-donated')
    survival.until_both_merged(processes)

    # All at once, while no process has the newest fragments on a disk.
    processes.until(
      lambda: all(5 < survival.unsaved(processes, m) < 36 for m in (0, 1)),
      START_S,
      'both have trained on since they have saved',
    )
    for each in (*learners, syncer):
      each.send(signal.SIGKILL)
    for each in (*learners, syncer):
      processes.exit_code(each)
    run.started['relabelled'] = len(run.tape)
    syncer, learners = survival.start_all(processes, 'relabelled')
    survival.until_both_merged(processes)

    # All of them, by SIGTERM: nothing is lost.
    survival.stop_all(run, 'all', [*learners, syncer])
    run.started['stopped'] = len(run.tape)
    syncer, learners = survival.start_all(processes, 'stopped')
    survival.until_both_merged(processes)

    # One learner, by SIGTERM.
    run.notice = len(run.tape)
    run.stopped_step = processes.steps(1)[-1]['step']
    began_s = time.monotonic()
    learners[1].send(signal.SIGTERM)
    run.codes['one'] = processes.exit_code(learners[1])
    run.took_s = time.monotonic() - began_s
    processes.until_merged(0)
    learners[1] = processes.learner(1, name='learner-1-last')
    processes.until_merged(1)
    survival.stop_all(run, 'end', [*learners, syncer])
    run.replay = processes.start_without_config('replay', 'diloco.replay')
    processes.exit_code(run.replay)
    yield run


@pytest.fixture(scope='module')
def diverged(survived):
  """Learner 0's checkpoint is of no use, learner 1's goes to two devices.

  Learner 2 joins, which the run has not seen. Learner 0 comes back while
  learner 1, which is asked for its state, dies of SIGKILL.
  """
  processes = survived.processes
  survival.spoil(processes.workdir.checkpoints('learner-0'))
  processes.syncer(name='syncer-diverged')
  learner = processes.learner(0, name=DIVERGED)
  survived.diverged_code = processes.exit_code(learner)
  mesh = processes.learner(
    1,
    'mesh.fsdp=2',
    name='learner-1-mesh',
    environment={'JAX_NUM_CPU_DEVICES': '2'},
  )
  processes.until_merged(1)

  # A third id. Learner 0 is held until its donor can't answer, and dies.
  processes.learner(2)
  gate = Gate(processes.address)
  processes.learner(0, name=CLEAN, flags=(f'--syncer={gate.address}',))
  processes.until_merged(2)
  processes.until(gate.reached.is_set, START_S, f'{CLEAN} connects')
  mesh.send(signal.SIGSTOP)
  survived.asked = len(survived.tape)
  gate.open()
  processes.until(
    lambda: (
      'donor' in [line['kind'] for line in survived.tape[survived.asked :]]
    ),
    START_S,
    'learner 1 is asked for its state',
  )
  mesh.end()
  processes.until_merged(0)
  return survived


# A learner that was killed ---------------------------------------------------


def test_a_killed_learner_takes_the_state_of_its_peer(survived):
  again = survived.begins(1)[1]
  assert again['source']['kind'] == 'peer'
  assert again['source']['learner'] == 0


def test_it_says_whose_state_it_took_and_of_which_step(survived):
  source = survived.begins(1)[1]['source']
  log = survived.log('learner-1-peer')
  assert f'the inner state of learner 0, at its step {source["step"]}' in log, (
    survived.processes.tails()
  )


def test_it_goes_on_where_its_reports_ended(survived):
  """No row twice, none left out, but for reports that it never sent."""
  again = survived.begins(1)[1]
  greeted = [
    line['rows']
    for line in survived.tape
    if line['kind'] == 'Greet'
    and line['learner'] == 1
    and process_of(line['incarnation']) == again['process']
  ]
  assert again['rows'] == greeted[0]
  steps = again['rows'] // BATCH
  assert survived.steps - IN_FLIGHT <= steps <= survived.steps + 1


# A syncer that was killed ----------------------------------------------------


def test_a_killed_syncer_gets_lost_fragments_back(survived):
  lines = survived.after('donated')
  [started] = [line for line in lines if line['kind'] == 'Started']

  def fragments(kind):
    return [
      int(re.match(r'fragment (\d+)', line['reason'])[1])
      for line in lines
      if line['kind'] == kind
    ]

  donated, lost = fragments('donated'), fragments('lost')
  assert sorted(donated + lost) == list(range(FRAGMENTS))
  assert started['outer_versions'] < started['versions']
  published = survived.crcs_at(started)
  heard = [
    (line['fragment'], line['crc'])
    for m in (0, 1)
    for line in read_jsonl(survived.processes.workdir.learner_tape(m))
    if line['kind'] == 'Apply'
  ]
  assert not {(p, published[p]) for p in lost} & set(heard), (
    'a learner had what no learner gave back'
  )
  for p in donated:
    assert started['crcs'][p] == published[p]


def test_learners_trained_on_meanwhile(survived):
  """No learner began again because of the syncer."""
  shares = [
    share
    for line in survived.after('donated')
    if line['kind'] == 'Publish'
    for share in line['shares']
  ]
  begins = survived.begins(0)[0], survived.begins(1)[1]
  assert {process_of(share['incarnation']) for share in shares} == {
    begin['process'] for begin in begins
  }


def test_versions_rise_by_one_over_all_deaths(survived):
  closes = [line for line in survived.tape if line['kind'] == 'Publish']
  assert [c['round'] for c in closes] == list(range(1, len(closes) + 1))
  for p in range(FRAGMENTS):
    versions = [c['version'] for c in closes if c['fragment'] == p]
    assert versions == list(range(1, len(versions) + 1)), f'fragment {p}'


# All at once -----------------------------------------------------------------


def test_what_nobody_has_goes_on_from_an_older_copy(survived):
  lines = survived.after('relabelled')
  [started] = [line for line in lines if line['kind'] == 'Started']
  lost = [line for line in lines if line['kind'] == 'lost']
  assert lost, 'somebody had the newest fragments'
  assert started['crcs'] != survived.crcs_at(started)
  held = {
    (line['fragment'], line['crc'])
    for line in survived.tape
    if line['kind'] == 'Publish'
  }
  assert set(enumerate(started['crcs'])) <= held


def test_a_learner_without_peers_goes_on_from_its_checkpoint(survived):
  begins = survived.begins(0)[1], survived.begins(1)[2]
  alone = [b for b in begins if b['source']['kind'] == 'checkpoint']
  assert alone
  assert all(b['source']['step'] == b['step'] for b in alone)
  assert all(b['rows'] >= (b['step'] - IN_FLIGHT) * BATCH for b in alone)


# In good order ---------------------------------------------------------------


def test_sigterm_ends_all_in_good_order(survived):
  assert len(survived.codes) == 7
  assert set(survived.codes.values()) == {STOPPED}, survived.codes


def test_after_sigterm_nothing_is_lost(survived):
  lines = survived.after('stopped')
  [started] = [line for line in lines if line['kind'] == 'Started']
  assert started['versions'] == started['outer_versions']
  assert started['crcs'] == started['outer_crcs'] == survived.crcs_at(started)
  assert not {'donated', 'lost'} & {line['kind'] for line in lines}


def test_one_that_is_stopped_hands_in_its_last_steps(survived):
  """Merged, where the round was not merging before the offer was there."""
  process = survived.begins(1)[-2]['process']
  lines = [
    line
    for line in read_jsonl(survived.processes.workdir.learner_tape(1))
    if line['process'] == process
  ]
  cease = next(line for line in lines if line['kind'] == 'Cease')
  offered = [
    line['round']
    for line in lines
    if line['kind'] == 'Snapshot' and line['step'] == cease['step']
  ]
  tape = survived.tape[survived.notice :]
  # It goes without that word where its round was merging, and has closed.
  leaving = [line['kind'] in ('leaving', 'left') for line in tape].index(True)
  merges = [line for line in tape[leaving:] if line['kind'] == 'Merge']
  merged = {
    (line['round'], share['learner'], share['step'])
    for line in merges
    for share in line['shares']
  }
  assert cease['step'] > survived.stopped_step
  for round_ in offered:
    if round_ in [line['round'] for line in merges]:
      assert (round_, 1, cease['step']) in merged


def test_one_that_is_stopped_says_what_came_of_its_last_steps(survived):
  process = survived.begins(1)[-2]['process']
  lines = [
    line
    for line in read_jsonl(survived.processes.workdir.learner_tape(1))
    if line['process'] == process
  ]
  cease = next(line for line in lines if line['kind'] == 'Cease')
  [left] = [line for line in lines if line['kind'] == 'Leave']
  assert f'left: {left["reason"]}' in survived.log('learner-1-stopped')
  said = re.findall(
    r'of fragment (\d+) up to step (\d+): (?:merged by round (\d+))?',
    left['reason'],
  )
  assert said, left
  merged = {
    (line['round'], share['step'])
    for line in survived.tape[survived.notice :]
    if line['kind'] == 'Merge'
    for share in line['shares']
    if share['learner'] == 1
  }
  for _, step, round_ in said:
    assert int(step) <= cease['step']
    if round_:
      assert (int(round_), int(step)) in merged


def test_one_that_is_stopped_is_gone_within_its_notice(survived):
  assert survived.took_s < survival.NOTICE_S


def test_one_that_was_stopped_goes_on_at_its_row(survived):
  before, again = survived.begins(1)[-2:]
  [cease] = [
    line
    for line in read_jsonl(survived.processes.workdir.learner_tape(1))
    if line['kind'] == 'Cease' and line['process'] == before['process']
  ]
  made = cease['step'] - before['step']
  assert again['rows'] == before['rows'] + made * BATCH
  assert again['step'] == cease['step']


# For people ------------------------------------------------------------------


def test_time_outs_stand_in_the_logs(survived):
  assert re.search(r'time-out of a pull: \d+', survived.log('syncer'))
  assert re.search(r'time-out of a pull: \d+', survived.log('learner-0'))


def test_all_of_it_is_replayed_to_the_same_bytes(survived):
  replay = survived.replay
  assert replay.exit_code == 0, survived.processes.tails()
  assert 'every round has the CRC of the run' in replay.output
  sources = {b['source']['kind'] for m in (0, 1) for b in survived.begins(m)}
  assert sources == {'seed', 'peer', 'checkpoint'}


def test_every_token_is_accounted_for(survived):
  """Learners and syncer agree over all deaths and restarts."""
  workdir = survived.processes.workdir
  found = token_ledger.rows_of(workdir, FRAGMENTS)
  assert {where for where, row in found.items() if row.unexplained} == set()
  assert {m for m, _ in found} == {0, 1}
  rows = [found[1, p] for p in range(FRAGMENTS)]
  assert all(row.merged > 0 for row in rows)
  # A fragment loses nothing where its learner dies as it has just offered it.
  assert any(token_ledger.DIED in dict(row.lost) for row in rows)
  steps = {line['step'] for line in survived.processes.steps(0)}
  assert found[0, 0].trained >= len(steps) * TOKENS


# Diverged, and another mesh -------------------------------------------------


@pytest.mark.soak
def test_a_diverged_learner_leaves_by_itself(diverged):
  assert diverged.diverged_code == 1
  assert re.search(r'left: loss nan at step \d+', diverged.log(DIVERGED))


@pytest.mark.soak
def test_it_comes_back_clean_through_a_peer(diverged):
  assert diverged.begins(0)[-1]['source']['kind'] == 'peer'
  losses = [line['train/loss'] for line in diverged.processes.steps(0)]
  assert np.isfinite(losses).all()


@pytest.mark.soak
def test_where_a_donor_is_killed_another_is_asked(diverged):
  asked = [
    line['reason']
    for line in diverged.tape[diverged.asked :]
    if line['kind'] == 'donor'
  ]
  assert asked == [f'learner {m} is asked for its state' for m in (1, 2)]
  assert diverged.begins(0)[-1]['source']['learner'] == 2


@pytest.mark.soak
def test_an_id_that_the_run_had_not_seen_is_taken_in(diverged):
  [begin] = diverged.begins(2)
  assert (begin['step'], begin['rows']) == (0, 0)
  assert (begin['source']['kind'], begin['source']['learner']) == ('peer', 1)


@pytest.mark.soak
def test_a_checkpoint_goes_on_on_another_mesh(diverged):
  before, begin = diverged.begins(1)[-2:]
  assert (before['machine']['fsdp'], begin['machine']['fsdp']) == (1, 2)
  assert begin['source']['kind'] == 'checkpoint'
  assert begin['source']['process'] == before['process']
