# SPDX-License-Identifier: Apache-2.0
"""One run of processes through every death that it must survive.

A single fixture kills and restarts in turn; each test looks at one thing that
must have come of it. The steps are short and slept out to a floor, so that
the machine is free for what starts, and the replay takes little.
"""

import dataclasses
import pathlib
import re
import signal
import time

import numpy as np
import pytest

from diloco.checkpoint import checkpoints
from diloco.metrics.workdir import learner_name
from diloco.metrics.writer import read_jsonl
from diloco.runtime.incarnation import process_of
from tests.runtime.gate import Gate
from tests.runtime.processes import ENDLESS, START_S, Processes, Running

FRAGMENTS = 2  # P of the tiny configuration.
FLOOR_S = 0.04  # Of a step.
SAVE_STEPS = 20
NOTICE_S = 20.0
IN_FLIGHT = 3  # Reports that a killed process may not have got rid of.
DIVERGED = 'learner-0-diverged'
CLEAN = 'learner-0-clean'
STOPPED = 128 + signal.SIGTERM

OVERRIDES = (
  'data.shards=4',
  f'run.step_floor_s={FLOOR_S}',
  'protocol.patience=0.6',
  'protocol.blend=carry',
  f'checkpoint.learner_every_steps={SAVE_STEPS}',
  'checkpoint.syncer_every_rounds=1000000',  # Only when it has to.
)


@dataclasses.dataclass
class Survived:
  """What the run looked like at each death.

  Attributes:
    processes: all of them; what they wrote is complete.
    steps: of learner 1, when it was killed alone.
    started: lines of the syncer's tape before each of its later starts.
    notice: lines of the syncer's tape when learner 1 got its SIGTERM.
    stopped_step: that learner 1 had written by then.
    took_s: from that to its exit.
    codes: exit codes, by what was ended.
    replay: of all that, done.
    diverged_code: exit code of the learner whose moments were spoilt.
    asked: lines of the syncer's tape before a donor was asked that died.
  """

  processes: Processes
  steps: int = 0
  started: dict[str, int] = dataclasses.field(default_factory=dict)
  notice: int = 0
  stopped_step: int = 0
  took_s: float = 0.0
  codes: dict[str, int] = dataclasses.field(default_factory=dict)
  replay: Running | None = None
  diverged_code: int | None = None
  asked: int = 0

  @property
  def tape(self) -> list[dict]:
    return read_jsonl(self.processes.workdir.tape)

  def after(self, phase: str) -> list[dict]:
    """The syncer's tape from a phase's start to the next one's."""
    bounds = [*self.started.values(), len(self.tape)]
    begin = self.started[phase]
    return self.tape[begin : min(b for b in bounds if b > begin)]

  def begins(self, learner: int) -> list[dict]:
    path = self.processes.workdir.learner_tape(learner)
    return [line for line in read_jsonl(path) if line['kind'] == 'Begin']


@pytest.fixture(scope='module')
def survived(tmp_path_factory):
  root = tmp_path_factory.mktemp('survival')
  with Processes(root, *ENDLESS, *OVERRIDES) as processes:
    run = Survived(processes)
    syncer = processes.syncer()
    learners = [processes.learner(m) for m in (0, 1)]
    _until_both_merged(processes)

    # One learner: it comes back through the other.
    learners[1].end()
    run.steps = processes.steps(1)[-1]['step']
    learners[1] = processes.learner(1, name='learner-1-peer')
    processes.until_merged(1)

    # The syncer: what its checkpoint lacks it gets back from the learners.
    syncer.end()
    run.started['donated'] = len(run.tape)
    syncer = processes.syncer(name='syncer-donated')
    _until_both_merged(processes)

    # Everybody, while nobody has the newest fragments on a disk.
    processes.until(
      lambda: all(_unsaved(processes, m) > 5 for m in (0, 1)),
      START_S,
      'both have trained on since they have saved',
    )
    for each in (*learners, syncer):
      each.send(signal.SIGKILL)
    for each in (*learners, syncer):
      processes.exit_code(each)
    run.started['relabelled'] = len(run.tape)
    syncer, learners = _start_all(processes, 'relabelled')
    _until_both_merged(processes)

    # Everybody, by SIGTERM: nothing is lost.
    _stop_all(run, 'all', [*learners, syncer])
    run.started['stopped'] = len(run.tape)
    syncer, learners = _start_all(processes, 'stopped')
    _until_both_merged(processes)

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
    _stop_all(run, 'end', [*learners, syncer])
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
  _spoil(processes.workdir.checkpoints('learner-0'))
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


def _spoil(folder: pathlib.Path):
  """A newer checkpoint, whole and sound, whose moments are not numbers."""
  store = checkpoints.Checkpoints(folder, 2, 0, print)
  newest = folder / str(store.newest_step)
  text = checkpoints._read_text(newest)
  arrays = {
    name: array * np.float32(np.nan)
    if name.startswith('inner_state/') and array.dtype == np.float32
    else array
    for name, array in checkpoints._read_arrays(newest, text['arrays']).items()
  }
  assert store.save(store.newest_step + 1, arrays, text['meta'], None)
  store.close(START_S)
  assert store.failed == 0


def _until_both_merged(processes: Processes):
  for m in (0, 1):
    processes.until_merged(m)


def _start_all(processes: Processes, phase: str):
  syncer = processes.syncer(name=f'syncer-{phase}')
  learners = [
    processes.learner(
      m,
      name=f'{learner_name(m)}-{phase}',
      flags=(f'--notice_s={NOTICE_S}',),
    )
    for m in (0, 1)
  ]
  return syncer, learners


def _stop_all(run: Survived, name: str, running: list[Running]):
  for each in running:
    each.send(signal.SIGTERM)
  for each in running:
    run.codes[f'{name} {each.name}'] = run.processes.exit_code(each)


def _unsaved(processes: Processes, learner: int) -> int:
  """Steps since its last turn to save."""
  return processes.steps(learner)[-1]['step'] % SAVE_STEPS


# A learner that was killed ---------------------------------------------------


def test_a_killed_learner_takes_the_state_of_its_peer(survived):
  [first, again, *_] = survived.begins(1)
  assert first['source']['kind'] == 'seed'
  assert again['source']['kind'] == 'peer'
  assert again['source']['learner'] == 0


def test_it_says_whose_state_it_took_and_of_which_step(survived):
  source = survived.begins(1)[1]['source']
  log = _log(survived, 'learner-1-peer')
  assert f'the inner state of learner 0, at its step {source["step"]}' in log, (
    survived.processes.tails()
  )


def test_it_goes_on_where_its_reports_ended(survived):
  """No batch twice, none left out, but for reports that it never sent."""
  again = survived.begins(1)[1]
  greeted = [
    line['position']
    for line in survived.tape
    if line['kind'] == 'Greet'
    and line['learner'] == 1
    and process_of(line['incarnation']) == again['process']
  ]
  assert again['position'] == greeted[0]
  assert survived.steps - IN_FLIGHT <= again['position'] <= survived.steps + 1


# A syncer that was killed ----------------------------------------------------


def test_a_killed_syncer_gets_lost_fragments_back(survived):
  lines = survived.after('donated')
  [started] = [line for line in lines if line['kind'] == 'Started']
  donated = [line for line in lines if line['kind'] == 'donated']
  assert len(donated) == FRAGMENTS
  assert started['outer_versions'] < started['versions']
  assert started['crcs'] == _crcs_at(survived, started)


def test_learners_trained_on_meanwhile(survived):
  """Nobody began again for the syncer's sake."""
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
  assert started['crcs'] != _crcs_at(survived, started)
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
  assert all(b['position'] >= b['step'] - IN_FLIGHT for b in alone)


# In good order ---------------------------------------------------------------


def test_sigterm_ends_all_in_good_order(survived):
  assert len(survived.codes) == 7
  assert set(survived.codes.values()) == {STOPPED}, survived.codes


def test_after_sigterm_nothing_is_lost(survived):
  lines = survived.after('stopped')
  [started] = [line for line in lines if line['kind'] == 'Started']
  assert started['versions'] == started['outer_versions']
  assert started['crcs'] == started['outer_crcs'] == _crcs_at(survived, started)
  assert not {'donated', 'lost'} & {line['kind'] for line in lines}


def test_one_that_is_stopped_hands_in_its_last_steps(survived):
  """It is merged after the signal, with steps that it made after it."""
  shares = [
    share
    for line in survived.tape[survived.notice :]
    if line['kind'] == 'Publish'
    for share in line['shares']
    if share['learner'] == 1
  ]
  leaving = [
    line['learner']
    for line in survived.tape[survived.notice :]
    if line['kind'] == 'leaving'
  ]
  process = survived.begins(1)[-2]['process']
  last = [s for s in shares if process_of(s['incarnation']) == process]
  assert 1 in leaving
  assert max(s['step'] for s in last) > survived.stopped_step


def test_one_that_is_stopped_is_gone_within_its_notice(survived):
  assert survived.took_s < NOTICE_S


def test_one_that_was_stopped_goes_on_at_its_position(survived):
  before, again = survived.begins(1)[-2:]
  [cease] = [
    line
    for line in read_jsonl(survived.processes.workdir.learner_tape(1))
    if line['kind'] == 'Cease' and line['process'] == before['process']
  ]
  made = cease['step'] - before['step']
  assert again['position'] == before['position'] + made
  assert again['step'] == cease['step']


# For people ------------------------------------------------------------------


def test_time_outs_stand_in_the_logs(survived):
  assert re.search(r'time-out of a pull: \d+', _log(survived, 'syncer'))
  assert re.search(r'time-out of a pull: \d+', _log(survived, 'learner-0'))


def test_silence_limits_stand_in_the_log(survived):
  log = _log(survived, 'syncer')
  for m in (0, 1):
    assert re.search(rf'time-out: learner {m} may be silent \d+\.\d s', log)


def test_all_of_it_is_replayed_to_the_same_bytes(survived):
  replay = survived.replay
  assert replay.exit_code == 0, survived.processes.tails()
  assert 'every round has the CRC of the run' in replay.output
  sources = {b['source']['kind'] for m in (0, 1) for b in survived.begins(m)}
  assert sources == {'seed', 'peer', 'checkpoint'}


# Diverged, and another mesh -------------------------------------------------


def test_a_diverged_learner_leaves_by_itself(diverged):
  assert diverged.diverged_code == 1
  assert re.search(r'left: loss nan at step \d+', _log(diverged, DIVERGED))


def test_it_comes_back_clean_through_a_peer(diverged):
  assert diverged.begins(0)[-1]['source']['kind'] == 'peer'
  losses = [line['train/loss'] for line in diverged.processes.steps(0)]
  assert np.isfinite(losses).all()


def test_where_a_donor_is_killed_another_is_asked(diverged):
  asked = [
    line['reason']
    for line in diverged.tape[diverged.asked :]
    if line['kind'] == 'donor'
  ]
  assert asked == [f'learner {m} is asked for its state' for m in (1, 2)]
  assert diverged.begins(0)[-1]['source']['learner'] == 2


def test_an_id_that_the_run_had_not_seen_is_taken_in(diverged):
  [begin] = diverged.begins(2)
  assert (begin['step'], begin['position']) == (0, 0)
  assert (begin['source']['kind'], begin['source']['learner']) == ('peer', 1)


def test_a_checkpoint_goes_on_on_another_mesh(diverged):
  before, begin = diverged.begins(1)[-2:]
  assert (before['machine']['fsdp'], begin['machine']['fsdp']) == (1, 2)
  assert begin['source']['kind'] == 'checkpoint'
  assert begin['source']['process'] == before['process']


def _log(survived: Survived, name: str) -> str:
  return next(
    each.output for each in survived.processes.running if each.name == name
  )


def _crcs_at(survived: Survived, started: dict) -> list[int]:
  """Of the started versions, as the tape had them when they were closed."""
  crcs = {
    (line['fragment'], line['version']): line['crc']
    for line in survived.tape
    if line['kind'] == 'Publish'
  }
  return [crcs[p, v] for p, v in enumerate(started['versions'])]
