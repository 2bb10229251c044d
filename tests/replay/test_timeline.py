# SPDX-License-Identifier: Apache-2.0
"""Tapes as they are read and printed; `--rewrite` writes the golden text."""

import json
import pathlib

import pytest

from diloco.metrics.files import MalformedFile
from diloco.metrics.workdir import Workdir
from diloco.protocol.incarnation import incarnation_of
from diloco.protocol.syncer import events as syncer_events
from diloco.replay import timeline
from diloco.run import event_log
from diloco.run.event_log import read_tapes
from tests.commands import output, refused
from tests.replay import taped

REPOSITORY = pathlib.Path(__file__).parents[2]
GOLDEN = pathlib.Path(__file__).with_name('timeline.txt')
FIRST, AGAIN, OTHER = 1000, 2000, 1001  # Processes of learners 1, 1 and 0.


def _share(learner, process, weight, base, step):
  incarnation = incarnation_of(process, 1)
  return syncer_events.Share(
    learner, incarnation, base, 4, 512, step, weight, 7, 0.25, 0.5
  )


def _round(time_s, number, version, shares, reason, closes=True):
  fragment = (number - 1) % 2
  merge = syncer_events.Merge(
    number, fragment, version, 4 * number, shares, 0.5, 0.1, reason
  )
  lines = [taped.line(time_s, merge)]
  if closes:
    publish = event_log.Publish(
      number, fragment, version, 4 * number, shares, ((0, 1),), (4,), 0.2, 77
    )
    lines.append(taped.line(time_s + 0.2, publish))
  return lines


def _record(time_s, kind, learner, reason):
  fields = {'time_s': time_s, 'kind': kind}
  return fields | {'learner': learner, 'reason': reason}


def _greet(time_s, learner, process, step, rows):
  incarnation = incarnation_of(process, 1)
  return taped.line(
    time_s,
    syncer_events.AdmitLearner(
      learner, incarnation, step, 0, (0, 0), rows, (), False, ()
    ),
  )


def _started(time_s, closed_round, versions):
  return taped.line(
    time_s, event_log.Started(closed_round, versions, (1, 2), versions, (1, 2))
  )


@pytest.fixture
def workdir(tmp_path) -> Workdir:
  """A run with a death, a refusal, and a syncer that starts twice."""
  both = (_share(0, OTHER, 0.75, 0, 4), _share(1, FIRST, 0.25, 0, 4))
  late = (_share(0, OTHER, 0.5, 0, 9), _share(1, AGAIN, 0.5, 0, 3))
  syncer = [
    _started(100.0, 0, (0, 0)),
    _greet(101.0, 0, OTHER, 0, 0),
    _record(101.0, 'joined', 0, 'incarnation 4100097'),
    _record(101.5, 'ready', 0, 'starts at step 0'),
    _greet(102.0, 1, FIRST, 0, 0),
    _record(102.5, 'ready', 1, 'starts at step 0'),
    *_round(103.0, 1, 1, both, 'everyone is in'),
    _record(104.0, 'pull_failed', 1, 'PeerLost: gone'),
    _record(104.1, 'left', 1, 'the connection was lost'),
    *_round(105.0, 2, 1, both[:1], 'window over, 1/1 offers, 1 live'),
    *_round(106.0, 3, 2, both[:1], 'everyone is in', closes=False),
    _started(108.0, 2, (1, 1)),
    _greet(110.0, 1, AGAIN, 9, 5),
    *_round(111.0, 3, 2, late, 'everyone is in'),
    _record(112.0, 'left', 0, 'goodbye: run is over'),
    taped.line(112.5, syncer_events.End(12, 3)),
  ]
  learners = {
    0: [
      taped.line(
        101.2,
        event_log.BeginLogged(OTHER, 0, 0, 0, event_log.SEED, taped.MACHINE),
      ),
      taped.line(
        102.9,
        event_log.SnapshotLogged(
          1, 0, 0, 4, process=OTHER, tokens=40, handle=7
        ),
      ),
      taped.line(
        103.4, event_log.ApplyLogged(OTHER, 5, 50, 0, 1, 77, False, 7, 9, 0)
      ),
      taped.line(111.9, event_log.CeaseLogged(OTHER, 12, 120)),
      taped.line(112.1, event_log.LeaveLogged(OTHER, 12, 120, 'run is over')),
    ],
    1: [
      taped.line(
        110.2,
        event_log.BeginLogged(
          AGAIN,
          0,
          0,
          5,
          event_log.Source('peer', 0, OTHER, 7, (1, 0), (77, 2)),
          taped.MACHINE,
        ),
      ),
      taped.line(110.3, event_log.Progress(AGAIN, 0, 0, 9)),
    ],
  }
  return taped.write(tmp_path, syncer, learners)


def test_timeline_is_as_it_was(workdir, request):
  tapes = read_tapes(workdir)
  found = timeline.timeline_rows(tapes)
  rows = timeline.text(timeline.chosen(found, None, 0.0, 1e9, frozenset()))
  text = '\n'.join(rows) + '\n'
  if request.config.getoption('--rewrite'):
    GOLDEN.write_text(text)
  assert text == GOLDEN.read_text(), 'pytest --rewrite, and read the diff'


def test_one_learner_is_shown_with_its_steps(workdir):
  found = timeline.timeline_rows(read_tapes(workdir))
  shown = timeline.chosen(found, 0, 2.0, 4.0, frozenset())
  assert [each.kind for each in shown] == ['snapshot', 'round', 'apply']


def test_a_run_of_the_lab_has_processes_without_a_pid(workdir):
  record = {'time_s': 0.0, 'process': 'learner-1', 'event': 'started'}
  line = json.dumps({**record, 'detail': 'for a while'})
  workdir.events.write_text(line + '\n')
  found = timeline.timeline_rows(read_tapes(workdir))
  (said,) = (each.words for each in found if each.kind == 'process')
  assert said == 'learner-1 started: for a while'


def test_a_torn_last_line_is_left_out_and_told(workdir):
  path = workdir.learner_tape(0)
  path.write_bytes(path.read_bytes()[:-20])
  tapes = read_tapes(workdir)
  assert tapes.torn == (path,)
  assert len(tapes.learners[0]) == 4


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'kind': 'Jump'}, r"learner-0\.jsonl:2: kind 'Jump'"),
    ({'step': '4'}, r"learner-0\.jsonl:2: Snapshot\.step='4'"),
    ({'round': None}, r'learner-0\.jsonl:2: Snapshot\.round=None'),
    ({'extra': 1}, r'learner-0\.jsonl:2: Snapshot: .* extra'),
  ],
)
def test_a_malformed_line_is_named(workdir, change, message):
  path = workdir.learner_tape(0)
  lines = path.read_text().splitlines()
  lines[1] = json.dumps(json.loads(lines[1]) | change)
  path.write_text('\n'.join(lines) + '\n')
  with pytest.raises(MalformedFile, match=message):
    read_tapes(workdir)


def test_the_main_prints_the_timeline(workdir):
  assert output('-m', 'diloco.tape', workdir.root) == GOLDEN.read_text()


def test_the_main_says_what_is_wrong(tmp_path):
  [said] = refused('-m', 'diloco.tape', tmp_path)
  assert said == f'error: no event log at {tmp_path}/tape.jsonl'
