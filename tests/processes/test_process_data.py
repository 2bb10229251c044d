# SPDX-License-Identifier: Apache-2.0
"""Parquet, and a mixture, train, are killed, and go on with the next row.

A syncer and a learner are processes; the learner dies of SIGKILL in the midst
of a run of 24 steps. That the batches are those that would have come is shown
by the replay: it takes batches by their rows from a dataset of its own, and
must come to every CRC and to the same final bytes.
"""

import signal

import pytest

from diloco.data import records_folder
from diloco.data.tokenizers import make_tokenizer
from diloco.metrics.jsonl import read_jsonl
from diloco.protocol.incarnation import process_of
from tests.data import made_files
from tests.processes.processes import START_S, Processes

pytestmark = pytest.mark.soak

STEPS = 24
KILLED_AFTER = 10
BATCH = 4  # Of `tests_tiny`.
IN_FLIGHT = 3  # Reports that a killed process may not have got rid of.


def _parquet(folder, texts):
  path = made_files.parquet(folder / 'parquet', texts)
  name = made_files.tokenizers_json(folder / 'tokenizer.json', texts)
  return ('parquet', f'{path}/text-*.parquet', name), ()


def _mix(folder, texts):
  """Returns documents that are tokens already, and others of Examples."""
  name = made_files.tokenizers_json(folder / 'json', texts)
  tokens = folder / 'tokens'
  documents = (text.encode() for text in texts if text)
  records_folder.write_records(tokens, 3, documents, make_tokenizer(name))
  examples = made_files.examples(folder / 'toy', made_files.texts(seed=1))
  mix = (
    f'0.7 array_record {tokens}',
    f'0.3 array_record:text {examples}/toy-train*',
  )
  held = f'1 array_record:text {examples}/toy-validation*'
  return ('mix', '', name), (f'data.mix={mix!r}', f'data.heldout_path={held}')


@pytest.mark.parametrize('made', [_parquet, _mix])
def test_a_killed_learner_goes_on_with_the_next_row(made, tmp_path):
  (source, path, tokenizer), more = made(tmp_path, made_files.texts())
  overrides = (
    f'data.source={source}',
    f'data.path={path}',
    f'data.tokenizer={tokenizer}',
    f'data.index_path={tmp_path / "indices"}',
    'data.heldout_percent=8.0',
    'data.shards=2',
    *more,
    f'model.vocab={made_files.VOCAB}',
    'protocol.learners=1',
    f'protocol.total_steps={STEPS}',
    'checkpoint.learner_every_steps=5',
    'run.step_floor_s=0.05',
  )
  lasts = 'run.step_floor_s=1.0'  # Longer than its first checkpoint takes.
  with Processes(tmp_path, *overrides) as processes:
    syncer = processes.syncer()
    dies = processes.learner(0, lasts)
    checkpoints = processes.workdir.checkpoints('learner-0')
    saved = lambda: any(p.name.isdecimal() for p in checkpoints.glob('*'))  # noqa: E731
    processes.until(
      lambda: len(processes.steps(0)) >= KILLED_AFTER and saved(),
      START_S,
      'it trains, and has a checkpoint',
    )
    dies.send(signal.SIGKILL)
    processes.exit_code(dies)
    reported = processes.steps(0)[-1]['step']
    again = processes.learner(0, name='learner-0-again')
    assert processes.exit_code(again) == 0, processes.tails()
    assert processes.exit_code(syncer) == 0, processes.tails()
    replay = processes.start_without_config('replay', 'diloco.replay')
    assert processes.exit_code(replay) == 0, processes.tails()
  first, second = [
    line
    for line in read_jsonl(processes.workdir.learner_tape(0))
    if line['kind'] == 'Begin'
  ]
  greeted = [
    line['rows']
    for line in processes.tape('Greet')
    if process_of(line['incarnation']) == second['process']
  ]
  assert (first['rows'], second['source']['kind']) == (0, 'checkpoint')
  # The last report may have died with the process; its checkpoint has not.
  assert second['rows'] >= greeted[0]
  steps = second['rows'] // BATCH
  assert reported - IN_FLIGHT <= steps <= reported + 1
  assert 'every round has the CRC of the run' in replay.output
  assert f'{processes.workdir.parameters}: the same bytes' in replay.output
