# SPDX-License-Identifier: Apache-2.0
"""A run done again from its event logs has the same bytes; from other event
logs, not.
"""

import numpy as np
import pytest

from diloco.checkpoint.parameters import read_parameters
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir
from diloco.protocol.incarnation import incarnation_of, process_of
from diloco.replay.replay import (
  NotReplayable,
  Replay,
  ReplayBackend,
  Replayed,
  make_plan,
)
from diloco.run.event_log import ApplyLogged, read_tapes
from tests.in_process.in_process import Run
from tests.replay.taped import changed
from tests.transport.faulty import Faults

pytestmark = pytest.mark.beside

STEPS = 40
BATCH = 4  # Of `tests_tiny`.


@pytest.fixture(scope='module')
def synchronous(tmp_path_factory):
  """A run of one fragment that all wait for: θ = Θ after each round."""
  run = Run(
    tmp_path_factory.mktemp('synchronous'),
    Faults(),
    total_steps=STEPS,
    quorum=2,
    overlap_steps=0,
    fragments=1,
    sync_every_steps=4,
  )
  run.finish()
  return run


def _replay(run: Run, workdir: Workdir | None = None) -> Replayed:
  plan = make_plan(read_tapes(workdir or run.workdir))
  held = ReplayBackend(run.run_spec, run.programs)
  return Replay(run.run_spec, plan, held).run()


def _assert_same_bytes(replayed: Replayed, run: Run):
  assert replayed.difference is None, str(replayed.difference)
  written = read_parameters(run.workdir.parameters)
  assert written.keys() == replayed.parameters.keys()
  for path, array in written.items():
    np.testing.assert_array_equal(
      replayed.parameters[path].view(np.uint32), array.view(np.uint32), path
    )


def test_a_replay_has_the_bytes_of_the_run(synchronous):
  replayed = _replay(synchronous)
  _assert_same_bytes(replayed, synchronous)
  assert replayed.ended
  assert replayed.rounds == STEPS // 4


# Planted faults --------------------------------------------------------------


def test_another_weight_is_found_in_its_round(synchronous, tmp_path):
  def plant(lines):
    merge = next(x for x in lines if x['kind'] == 'Merge' and x['round'] == 5)
    merge['shares'][0]['weight'] += 0.01
    return lines

  copied = changed(synchronous.workdir, tmp_path, syncer=plant)
  replayed = _replay(synchronous, copied)
  assert replayed.difference.round == 5
  assert replayed.rounds == 4


def test_another_step_of_an_apply_is_found(synchronous, tmp_path):
  """The first round that merges what was blended in a step later differs.

  Every round merges learner 1 (K = 2), so that is the one after the apply.
  """

  def plant(lines):
    applies = [each for each in lines if each['kind'] == 'Apply']
    number = lines.index(applies[2])
    # Behind what follows at its boundary, which begins the next steps.
    applies[2]['step'] += 1
    later = [x for x in lines[number + 1 :] if x['step'] < applies[2]['step']]
    rest = [x for x in lines[number + 1 :] if x not in later]
    return [*lines[:number], *later, applies[2], *rest]

  copied = changed(synchronous.workdir, tmp_path, learner=plant)
  version = [
    x.event.version
    for x in read_tapes(copied).learners[1]
    if isinstance(x.event, ApplyLogged)
  ][2]
  difference = _replay(synchronous, copied).difference
  assert (difference.round, difference.fragment) == (version + 1, 0)
  assert 'learner 1' in str(difference)
  assert f'round {version + 1}, fragment 0' in str(difference)


def test_a_missing_snapshot_is_named(synchronous, tmp_path):
  copied = changed(
    synchronous.workdir,
    tmp_path,
    learner=lambda lines: [x for x in lines if x['kind'] != 'Snapshot'],
  )
  round_ = _first_round_after(synchronous, step=0)
  with pytest.raises(
    NotReplayable, match=rf'round {round_} merged learner 1.* step 4'
  ):
    make_plan(read_tapes(copied))


# Processes that go on where others were --------------------------------------


def _cut(run: Run, folder, step: int, source) -> Workdir:
  """Returns the same event logs, but learner 1's process ends after `step`.

  Another goes on from `source`, whose own steps count from 0 again.

  Args:
    run: is not changed.
    folder: for the copy.
    step: all of its boundary belongs to the first process.
    source: of the second, by that step's last `Apply`.
  """
  first = read_tapes(run.workdir).learners[1][0].event.process
  second = first + 1

  def cut_learner(lines):
    before = [x for x in lines if _is_before(x, step)]
    applied = [x for x in before if x['kind'] == 'Apply'][-1]
    begin = next(x for x in lines if x['kind'] == 'Begin')
    begin = {
      **begin,
      'process': second,
      'rows': step * BATCH,
      'source': source(first, step, applied),
    }
    after = [
      {**x, 'process': second, 'step': x['step'] - step}
      for x in lines
      if not _is_before(x, step)
    ]
    progress = {
      'time_s': begin['time_s'],
      'kind': 'Progress',
      'process': second,
      'step': 0,
      'tokens': 0,
      'progress': _progress_after(lines, step),
    }
    return [*before, begin, progress, *after]

  def cut_syncer(lines):
    for each in lines:
      for share in each.get('shares', ()):
        is_mine = process_of(share['incarnation']) == first
        if share['learner'] == 1 and is_mine and share['step'] > step:
          share['incarnation'] = incarnation_of(second, 1)
          share['step'] -= step
    return lines

  return changed(run.workdir, folder, cut_syncer, cut_learner)


def _is_before(line: dict, step: int) -> bool:
  is_of_next = line['kind'] == 'Progress' and line['step'] == step
  return line['step'] <= step and not is_of_next


def _progress_after(lines: list[dict], step: int) -> int:
  """Returns the schedule argument of the step after `step` steps."""
  told = [x for x in lines if x['kind'] == 'Progress' and x['step'] <= step]
  if not told:
    return step
  return told[-1]['progress'] + step - told[-1]['step']


def test_a_process_from_a_checkpoint(synchronous, tmp_path):
  """The process begins between two rounds, where all that it had counts."""

  def source(process, step, applied):
    return _source('checkpoint', None, process, step)

  copied = _cut(synchronous, tmp_path, 18, source)
  replayed = _replay(synchronous, copied)
  assert replayed.processes == 3
  _assert_same_bytes(replayed, synchronous)


def test_a_process_from_a_peer(synchronous, tmp_path):
  """At a boundary where θ = Θ only the inner state is the donor's."""

  def source(process, step, applied):
    assert applied['step'] == step
    versions, crcs = [applied['version']], [applied['crc']]
    return _source('peer', 1, process, step, versions, crcs)

  copied = _cut(synchronous, tmp_path, 16, source)
  replayed = _replay(synchronous, copied)
  assert replayed.processes == 3
  _assert_same_bytes(replayed, synchronous)


def test_a_process_from_the_seed_instead_differs(synchronous, tmp_path):
  """The tests above would find it if nothing were taken over."""

  def source(process, step, applied):
    return _source('seed', None, None, None)

  difference = _replay(
    synchronous, _cut(synchronous, tmp_path, 18, source)
  ).difference
  assert difference.round == _first_round_after(synchronous, step=18)


def _first_round_after(run: Run, step: int) -> int:
  """Returns the first round that merged learner 1 after its own `step`.

  Learner 0 may have closed rounds alone before learner 1 was there.
  """
  return next(
    line['round']
    for line in read_jsonl(run.workdir.tape)
    if line['kind'] == 'Merge'
    for share in line['shares']
    if share['learner'] == 1 and share['step'] > step
  )


def _source(kind, learner, process, step, versions=(), crcs=()) -> dict:
  return {
    'kind': kind,
    'learner': learner,
    'process': process,
    'step': step,
    'versions': list(versions),
    'crcs': list(crcs),
  }


# Syncers that go on where others were ----------------------------------------


def _restarted(
  lines, round_: int, unwritten: bool = False, behind: int = 0
) -> list[dict]:
  """Returns event log lines of a syncer that dies after `round_`, and of the
  next.

  Args:
    lines: of a run with one fragment.
    round_: the last that the ledger has.
    unwritten: the event log does not have it yet; else the next was merged.
    behind: the outer state is of so many versions before.
  """
  crcs = [*lines[0]['crcs']]  # By version.
  crcs += [x['crc'] for x in lines if x['kind'] == 'Publish']
  outer = round_ - behind
  started = lines[0] | {
    'closed_round': round_,
    'versions': [round_],
    'crcs': [crcs[round_]],
    'outer_versions': [outer],
    'outer_crcs': [crcs[outer]],
  }
  number = next(
    i
    for i, x in enumerate(lines)
    if x['kind'] == 'Publish' and x['round'] == round_
  )
  if unwritten:
    return [*lines[:number], started, *lines[number + 1 :]]
  merge = next(
    x for x in lines if x['kind'] == 'Merge' and x['round'] == round_ + 1
  )
  unclosed = {**merge, 'shares': merge['shares'][:1]}
  return [*lines[: number + 1], unclosed, started, *lines[number + 1 :]]


@pytest.mark.parametrize('unwritten', [False, True])
def test_a_syncer_that_goes_on(synchronous, tmp_path, unwritten):
  """A merge counts if its round closed, whether it is on event log or not."""
  copied = changed(
    synchronous.workdir,
    tmp_path,
    lambda lines: _restarted(lines, 6, unwritten=unwritten),
  )
  _assert_same_bytes(_replay(synchronous, copied), synchronous)


def test_a_syncer_with_an_older_outer_state(synchronous, tmp_path):
  """The fragment's next round has another momentum, and another residual."""
  copied = changed(
    synchronous.workdir, tmp_path, lambda lines: _restarted(lines, 6, behind=1)
  )
  assert _replay(synchronous, copied).difference.round == 7
