# SPDX-License-Identifier: Apache-2.0
"""Real processes train the user's own model; the lab ends in the same bytes.

τ = 0 and K = M: then no clock decides anything, and the lab, which has other
clocks, must come to the same Θ by its own machines.
"""

import ast

import pytest

import diloco
from diloco.checkpoint.parameters import read_parameters
from diloco.lab.run import crc
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.status import read_evaluation, read_summary
from diloco.metrics.workdir import EVALUATOR
from diloco.run import environment
from diloco.run.event_log import read_tapes
from tests.processes.processes import EXIT_CONFIG, START_S, Processes

pytestmark = pytest.mark.beside

RUN_S = 2 * START_S  # Two processes after each other.
CONFIG = '--config=experiments/own_model.py:quicktest'
SYNCHRONOUS = (
  '--config.protocol.overlap_steps=0',
  '--config.protocol.quorum=2',
  '--config.protocol.patience=6.0',
  '--config.run.eval_every_rounds=8',
)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A run of the launcher, with all its processes, as Python starts it."""
  with Processes(tmp_path_factory.mktemp('own_model')) as processes:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
      for name, value in processes.environment.items():
        patch.setenv(name, value)
      path = CONFIG.removeprefix('--config=')
      changes = dict(word[9:].split('=') for word in SYNCHRONOUS)
      diloco.train(
        path,
        processes.workdir.root,
        {key: ast.literal_eval(value) for key, value in changes.items()},
        say=said.append,
      )
    assert 'Validation loss of the global model' in '\n'.join(said)
    yield processes


def test_it_is_opened_as_a_value(trained):
  run = diloco.open_run(trained.workdir.root)
  evaluation = read_evaluation(trained.workdir.evaluation)
  assert run.losses[0] == (0.0, 0, evaluation.initial_loss)
  assert run.loss == evaluation.final_loss
  assert run.config.protocol.quorum == 2
  rounds = read_summary(trained.workdir.summary).rounds
  assert [event.kind for event in run.events].count('round') == rounds
  assert sorted(run.parameters) == sorted(
    read_parameters(trained.workdir.parameters)
  )
  assert 'finished, step 40 of 40' in repr(run)


def test_every_round_merges_both(trained):
  """The learner that was compiled first has waited for the other."""
  merged = [len(line['shares']) for line in trained.tape('Publish')]
  assert set(merged) == {2}
  assert read_summary(trained.workdir.summary).rounds == len(merged)


def test_t_is_the_step_of_all(trained):
  """No report is counted that an offer had already counted."""
  steps = [line['step'] for line in trained.tape('Publish')]
  assert steps == [2 * r for r in range(1, 21)] + [40]


def test_it_is_evaluated(trained):
  """A model without logits has no bits: those are for language models."""
  evaluation = read_evaluation(trained.workdir.evaluation)
  assert evaluation.final_loss < evaluation.initial_loss
  assert evaluation.final_bits_per_byte is None


def test_an_evaluator_follows(trained):
  """The number of evaluations in so short a run is open: none waits for it.

  One more that comes after the end evaluates what is left, if anything is.
  """
  late = trained.start_without_config(
    'evaluator-late', 'diloco.evaluator', CONFIG, *SYNCHRONOUS
  )
  assert trained.exit_code(late) == 0, trained.tails()
  records = read_jsonl(trained.workdir.metrics(EVALUATOR))
  assert records
  for each in records:
    assert each['step'] == min(2 * each['round'], 40)
    assert each['eval/loss'] > 0
    assert 0 < each['eval/merged_tokens'] <= 2 * 40 * 4 * 32


def test_the_evaluator_did_not_die(trained):
  started = [
    each
    for each in read_jsonl(trained.workdir.events)
    if (each['process'], each['event']) == (EVALUATOR, 'started')
  ]
  assert len(started) == 1


def test_the_lab_by_itself_ends_in_the_same_bytes(trained):
  machine = read_tapes(trained.workdir).learners[0][0].event.machine
  lab = trained.start_without_config(
    'lab',
    'diloco.lab',
    CONFIG,
    *SYNCHRONOUS,
    f'--workdir={trained.workdir.root / "lab"}',
    environment=environment.environment_like(machine),
  )
  assert trained.exit_code(lab, RUN_S) == 0, trained.tails()
  parameters = read_parameters(trained.workdir.parameters)
  assert f'parameters {crc(parameters):08x}' in lab.output


def test_a_model_that_is_not_there_ends_the_run(tmp_path):
  with Processes(tmp_path) as processes:
    other = '--config.model.kind=nowhere.at_all:model'
    syncer = processes.start_without_config(
      'syncer', 'diloco.syncer', CONFIG, other
    )
    assert processes.exit_code(syncer) == EXIT_CONFIG
    (error,) = syncer.errors
    assert error.startswith("error: model.kind='nowhere.at_all:model': No mod")
