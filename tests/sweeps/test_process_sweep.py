# SPDX-License-Identifier: Apache-2.0
"""A sweep of real processes: stopped in its second run, and resumed."""

import signal

import pytest

from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.status import read_status, read_summary
from diloco.metrics.workdir import Workdir
from diloco.sweeps import sweep
from diloco.watch.folders import FollowedFolders
from tests.processes.processes import START_S, Processes

pytestmark = pytest.mark.soak  # Three launches, one after the other.

LABELS = 'outer.lr = 0.3', 'outer.lr = 0.6'
FLAGS = '--sweep=outer.lr=0.3,0.6', '--seeds=1'
# Steps long enough, and enough of them, for a signal in between.
EVERY = (
  'model.kind=bowl',  # Its programs are compiled in no time.
  'model.layers=2',
  'run.compilation_cache=false',
  'run.step_floor_s=0.04',
  'protocol.total_steps=200',
  'protocol.patience=10',  # Beside others no learner is given up for silence.
  'protocol.quorum=2',
  'protocol.overlap_steps=0',  # Neither trains before the other is there.
  'checkpoint.learner_every_steps=10',
  'checkpoint.syncer_every_rounds=4',
)
RUN_S = 2 * START_S


class Sweep:
  """A sweep of two runs that was stopped in its second, and resumed twice."""

  def __init__(self, processes: Processes):
    self.processes = processes
    self.root = processes.workdir.root
    self.runs = [Workdir(sweep.folder(self.root, x, 0)) for x in LABELS]

  def make(self, name: str):
    return self.processes.start(name, 'launch.local', *FLAGS)

  def starts(self, run: int) -> list[str]:
    """Names of the processes that a run has started."""
    events = read_jsonl(self.runs[run].events)
    return [e['process'] for e in events if e['event'] == 'started']

  def result(self, run: int) -> sweep.SeedResult | None:
    return sweep.read(self.root, LABELS[run], 0)


@pytest.fixture(name='made', scope='module')
def fixture_made(tmp_path_factory):
  with Processes(tmp_path_factory.mktemp('sweep'), *EVERY) as processes:
    made = Sweep(processes)
    made.stopped = made.make('first')

    def is_in_the_second() -> bool:
      assert made.stopped.exit_code is None, processes.tails()
      status = read_status(made.runs[1].status)
      return status is not None and status.step >= 10

    processes.until(is_in_the_second, RUN_S, 'the second run trains')
    made.stopped.send(signal.SIGTERM)
    processes.exit_code(made.stopped)
    made.first = made.result(0)
    made.unfinished = made.result(1)
    made.starts_of_first = made.starts(0)
    made.resumed = made.make('second')
    assert processes.exit_code(made.resumed, RUN_S) == 0, processes.tails()
    yield made


def test_a_signal_ends_the_run_and_says_how_to_go_on(made):
  assert made.stopped.exit_code == 128 + signal.SIGTERM
  assert '1/2, about ' in made.stopped.output
  assert f'{LABELS[0]}, seed 0: loss {made.first.loss:.4f}' in (
    made.stopped.output
  )
  assert 'stopped by SIGTERM; no process is left; the same command goes on' in (
    made.stopped.output
  )
  assert made.unfinished is None


def test_the_first_run_is_not_made_again(made):
  assert made.starts(0) == made.starts_of_first
  assert made.result(0) == made.first or made.first.learners_loss != (
    made.first.learners_loss
  )
  assert '1 runs, one at a time' in made.resumed.output


def test_the_second_goes_on_where_it_stood(made):
  summary = read_summary(made.runs[1].summary)
  assert [each.incarnations for each in summary.learners] == [2, 2]
  said = (made.runs[1].root / 'logs' / 'launcher.log').read_text()
  assert f'goes on with the run in {made.runs[1].root}' in said
  rounds = [
    line['round']
    for line in read_jsonl(made.runs[1].tape)
    if line['kind'] == 'Publish'
  ]
  assert rounds == list(range(1, summary.rounds + 1))


def test_results_are_those_of_the_records(made):
  for run in (0, 1):
    found, summary = made.result(run), read_summary(made.runs[run].summary)
    assert (found.rounds, found.goodput) == (summary.rounds, summary.goodput)
    shares = [
      len(line['shares'])
      for line in read_jsonl(made.runs[run].tape)
      if line['kind'] == 'Publish'
    ]
    assert found.participation == sum(shares) / (2 * len(shares))
    assert found.unexplained_tokens == 0
    (first, none, initial), *_, (step, tokens, loss) = found.curve
    assert (first, none, step) == (0, 0, summary.step)
    assert initial > loss == found.loss
    made_steps = sum(each.steps for each in summary.learners)
    if run == 0:
      assert tokens == made_steps * 4 * 32
    else:  # The syncer counts from its checkpoint.
      assert tokens >= made_steps * 4 * 32


def test_the_table_compares_both(made):
  losses = [made.result(run).loss for run in (0, 1)]
  difference = 100 * (losses[1] / losses[0] - 1)
  row = next(
    x for x in made.resumed.output.splitlines() if x.startswith(LABELS[1])
  )
  assert f'{losses[1]:.4f}' in row
  assert f'{difference:+.2f}' in row


def test_the_page_is_that_of_a_sweep(made):
  page = FollowedFolders([made.root], 'again').page()
  [table] = [part for part in page.parts if part.name == 'sweep']
  assert [row[0] for row in table.rows] == [*LABELS]
  [curves] = [part for part in page.parts if part.name == 'sweep-loss']
  assert [line.label for line in curves.lines] == [*LABELS]
  assert not page.paragraphs


def test_what_was_lost_of_finished_runs_is_made_up_for(made):
  """One lacks its evaluation, the other one its result: nothing is trained."""
  before = [made.result(run).loss for run in (0, 1)]
  starts = [made.starts(run) for run in (0, 1)]
  made.runs[0].evaluation.unlink()
  for run in made.runs:
    run.result.unlink()
  again = made.make('third')
  assert made.processes.exit_code(again, RUN_S) == 0, again.output
  assert [made.result(run).loss for run in (0, 1)] == before
  assert made.starts(0) == [*starts[0], 'evaluate']
  assert made.starts(1) == starts[1]
