# SPDX-License-Identifier: Apache-2.0
"""Files of a run: what is written is read back, torn or wrong ones are seen."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest
from tensorboardX.proto import plugin_hparams_pb2

from diloco.metrics import figures, files, names, status, writer
from diloco.metrics import jsonl as metrics_jsonl
from diloco.metrics.workdir import Workdir
from tests.metrics import board_events
from tests.waiting import until

ROOT = pathlib.Path(__file__).parents[2]

LEARNER = status.LearnerStatus(
  learner=1, state=status.LIVE, step=7, steps=9, tokens=90, tokens_per_s=10.5,
  round=3, rounds=1, participation=0.5, incarnations=2, stall_max_s=0.25,
)  # fmt: skip
STATUS = status.RunStatus(
  run='x', time_s=1.5, step=7, total_steps=10, rounds=3, live=(0, 1),
  participants=(1,), goodput=0.9, uptime=1.0, bytes_up=1, learners=(LEARNER,),
)  # fmt: skip


def test_a_status_is_read_back_as_it_was(tmp_path):
  path = tmp_path / 'status.json'
  status.write_status(path, STATUS)
  assert status.read_status(path) == STATUS
  assert [p.name for p in tmp_path.iterdir()] == ['status.json']


def test_plain_data_are_what_asdict_gives():
  nested = {'in': (STATUS, [LEARNER]), 'none': None}
  by_hand = {
    'in': [dataclasses.asdict(STATUS), [dataclasses.asdict(LEARNER)]],
    'none': None,
  }
  assert json.dumps(files.plain(nested)) == json.dumps(by_hand)


def test_an_absent_status_is_none(tmp_path):
  assert status.read_status(tmp_path / 'status.json') is None


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'step': 'seven'}, "RunStatus.step='seven': expected int"),
    ({'live': 3}, 'RunStatus.live=3: expected a list'),
    ({'more': 3}, 'missing or unknown fields more'),
    ({'learners': [{}]}, r'RunStatus.learners\[0\]: missing or unknown'),
  ],
)
def test_a_wrong_status_says_what_is_wrong(tmp_path, change, message):
  path = tmp_path / 'status.json'
  status.write_status(path, STATUS)
  fields = json.loads(path.read_text())
  del fields['check']
  path.write_text(json.dumps(fields | change))
  with pytest.raises(files.MalformedFile, match=message):
    status.read_status(path)


def test_a_changed_digit_of_a_status_is_malformed(tmp_path):
  path = tmp_path / 'status.json'
  status.write_status(path, STATUS)
  path.write_text(path.read_text().replace('"step": 7', '"step": 8', 1))
  with pytest.raises(files.MalformedFile, match='has the checksum'):
    status.read_status(path)


def test_half_a_status_is_malformed(tmp_path):
  path = tmp_path / 'status.json'
  path.write_text('{"run":')
  with pytest.raises(files.MalformedFile, match=r'status\.json'):
    status.read_status(path)


def test_files_have_all_figures_by_their_names():
  found = status.as_json(STATUS)
  for table, told in (
    (figures.RUN, found),
    (figures.LEARNER, found['learners'][0]),
  ):
    assert {each.name for each in table} <= told.keys()
  assert found['tokens'] == 90
  assert found['participation'] == found['learners'][0]['participation'] == 0.5


def test_a_summary_of_an_older_version_is_completed_from_its_status(tmp_path):
  workdir = Workdir(tmp_path)
  learner = {
    'learner': 0, 'steps': 9, 'tokens': 90, 'rounds': 1, 'incarnations': 2,
    'beginning': 'seed', 'stall_max_s': 0.5, 'bytes_up': 1, 'bytes_down': 2,
  }  # fmt: skip
  summary = {
    'run': 'x', 'step': 10, 'rounds': 4, 'fragments': 2, 'wall_s': 7.5,
    'goodput': 0.5, 'uptime': 1.0, 'refused': 0, 'pulls_up': 1, 'pulls_down': 1,
    'bytes_up': 1, 'bytes_down': 2, 'learners': [learner],
  }  # fmt: skip
  last = {
    'run': 'x', 'time_s': 1.5, 'step': 10, 'total_steps': 12, 'closed_round': 4,
    'live': [0], 'participants': [0], 'quorum_s': 0.1, 'grace_s': 0.2,
    'sync_s': 0.3, 'goodput': 0.4, 'uptime': 0.9, 'bytes_up': 1,
    'bytes_down': 2, 'refused': 0, 'finished': True,
    'learners': [
      {
        'learner': 0, 'state': 'live', 'step': 3, 'loss': 2.5,
        'tokens_per_s': 9.0, 'round': 4, 'lag_versions': 0, 'bytes_up': 1,
        'bytes_down': 2, 'participation': 0.25, 'incarnations': 2,
        'stall_max_s': 0.5,
      }
    ],
  }  # fmt: skip
  workdir.status.write_text(json.dumps(last))
  assert status.of_run(workdir).rounds == 4
  workdir.summary.write_text(json.dumps(summary))
  found = status.of_run(workdir)
  assert (found.elapsed_s, found.goodput, found.grace_s) == (7.5, 0.5, 0.2)
  assert found.learners[0].tokens == 90 and found.learners[0].loss == 2.5
  assert found.learners[0].participation == 0.25


def test_bytes_per_parameter_of_one_leg():
  # 1000 parameters in 4 fragments of 250; 8 pulls carry each twice, at 125 B:
  # 4 bits a parameter.
  assert figures.bytes_per_parameter(8 * 125, 8, 4, 1000) == 0.5
  assert figures.bytes_per_parameter(8 * 1000, 8, 4, 1000) == 4.0
  assert figures.bytes_per_parameter(0, 0, 4, 1000) is None


def test_a_torn_last_line_is_left_out_and_cut_by_the_next_writer(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"step": 1}\n{"step": 2, "lo')
  assert metrics_jsonl.read_jsonl(path) == [{'step': 1}]
  jsonl = writer.JsonlWriter(path)
  jsonl.write_scalars(3, {})
  assert metrics_jsonl.read_jsonl(path) == [{'step': 1}, {'step': 3}]
  jsonl.close()


def test_no_file_is_no_records(tmp_path):
  assert metrics_jsonl.read_jsonl(tmp_path / 'a.jsonl') == []


def test_several_writers_get_the_same(tmp_path):
  jsonl = writer.JsonlWriter(tmp_path / 'a.jsonl')
  board = writer.TensorBoardWriter(tmp_path / 'board')
  both = writer.MultiWriter([jsonl, board])
  both.write_scalars(4, {names.TRAIN_LOSS: 2.5, names.TIME: 1234.5})
  both.flush()
  assert metrics_jsonl.read_jsonl(tmp_path / 'a.jsonl')[0][names.TIME] == 1234.5
  both.close()
  (event,) = [
    event
    for event in board_events.read(next((tmp_path / 'board').iterdir()))
    if event.summary.value
  ]
  assert event.step == 4
  assert event.wall_time == 1234.5
  assert [v.tag for v in event.summary.value] == [names.TRAIN_LOSS]
  assert event.summary.value[0].simple_value == 2.5


def test_a_process_writes_its_record_and_all_views(tmp_path, monkeypatch):
  views = dict.fromkeys(
    ('one', 'two'), lambda path, _: writer.JsonlWriter(path)
  )
  monkeypatch.setattr(writer, 'VIEWS', views)
  workdir = Workdir(tmp_path)
  files = [tmp_path / name / 'learner-0' for name in ('one', 'two')]
  files += [workdir.metrics('learner-0'), tmp_path / 'more']
  more = writer.JsonlWriter(files[-1])
  process = writer.process_writer(workdir, 'learner-0', {}, more)
  process.write_scalars(1, {names.TRAIN_LOSS: 2.5})
  process.close()
  for file in files:
    (record,) = metrics_jsonl.read_jsonl(file)
    assert record == {'step': 1, names.TRAIN_LOSS: 2.5}
  for view in files[:2]:
    view.unlink()
  process = writer.process_writer(workdir, 'learner-0', {}, views_anew=True)
  process.write_scalars(2, {})
  process.close()
  for file in files[:3]:
    steps = [record['step'] for record in metrics_jsonl.read_jsonl(file)]
    assert steps == [1, 2]


WRITES = """
import pathlib, sys, time
from diloco.metrics import writer
clock, time.time = time.time, lambda: 1e9  # Both lives begin in one second.
board = writer.TensorBoardWriter(pathlib.Path(sys.argv[1]))
time.time = clock
print('open', flush=True)
for step in range(1, 1 + int(sys.argv[2])):
  board.write_scalars(step, {'train/loss': 2.5})
time.sleep(600)
"""


def test_a_board_is_there_at_once_and_outlives_a_kill(tmp_path):
  """A learner's first life stays on the board, next to its second."""

  def steps() -> dict[str, list[int]]:
    return {
      path.name: [e.step for e in board_events.read(path) if e.summary.value]
      for path in tmp_path.iterdir()
    }

  for life in (1, 2):
    command = [sys.executable, '-c', WRITES, str(tmp_path), str(3 * life)]
    with subprocess.Popen(
      command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as learner:
      try:
        assert learner.stdout.readline() == 'open\n'
        assert len(steps()) == life, 'there is a file before the first scalar'
        written = list(range(1, 1 + 3 * life))
        until(lambda last=written: last in steps().values(), 60.0, steps)
      finally:
        learner.kill()
  assert sorted(steps().values()) == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]


def test_the_first_cards_of_a_board_are_no_bookkeeping(tmp_path):
  """TensorBoard sorts cards by name; those of no group came first of all."""
  board = writer.TensorBoardWriter(tmp_path)
  found = {
    names.TIME: 1.0,
    names.INCARNATION: 2.0**53,
    names.GLOBAL_STEP: 219.0,
    names.TRAIN_LOSS: 2.5,
    names.STEP_TIME: 0.1,
  }
  board.write_scalars(15, found)
  board.close()
  cards = {
    value.tag: value.simple_value
    for event in board_events.read(next(tmp_path.iterdir()))
    for value in event.summary.value
  }
  assert sorted(cards) == [names.STEP_TIME, 'run/global_step', names.TRAIN_LOSS]
  assert cards['run/global_step'] == 219.0


def test_a_board_has_the_configuration_to_compare_runs_by(tmp_path):
  hparams = {'outer.lr': 0.5, 'model.kind': 'decoder', 'run.x': (1, 2)}
  board = writer.TensorBoardWriter(tmp_path, hparams)
  board.write_scalars(1, {names.TIME: 1.0, names.TRAIN_LOSS: 2.5})
  board.close()
  parts = {
    value.tag: plugin_hparams_pb2.HParamsPluginData.FromString(
      value.metadata.plugin_data.content
    )
    for event in board_events.read(next(tmp_path.iterdir()))
    for value in event.summary.value
    if value.metadata.plugin_data.plugin_name == 'hparams'
  }
  experiment = parts.pop('_hparams_/experiment').experiment
  assert [each.name.tag for each in experiment.metric_infos] == list(
    writer.COMPARED
  )
  (session,) = parts.values()
  found = session.session_start_info.hparams
  assert found['outer.lr'].number_value == 0.5
  assert found['model.kind'].string_value == 'decoder'
  assert found['run.x'].string_value == '(1, 2)'
