# SPDX-License-Identifier: Apache-2.0
"""`status.json`, `summary.json` and `evaluation.json` of a run.

The syncer replaces `status.json` about once a second; `summary.json` is the
same at the end, written as its last act: its presence means 'finished'. Neither
influences training.
"""

import dataclasses
import json
import math
import pathlib

from diloco.metrics import figures, files, jsonl, names
from diloco.metrics.workdir import EVALUATOR, Workdir

# States of a learner, as the syncer sees it.
JOINING = 'joining'  # Said hello, bootstrap not complete.
LIVE = 'live'  # Counts for the quorum.
GONE = 'gone'  # Its incarnation ended; none has come since.
LEFT = 'left'  # Said goodbye.
# Kinds of a line of the syncer's event log that count as refusals.
REFUSALS = ('refused', 'zombie', 'pull_failed', 'stale', 'late', 'outlier')
NORMAL_95 = 1.959964  # 95 % of a normal distribution lie within so many σ.


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerStatus:
  """The status of one learner, over all its incarnations.

  None: not known, as in older files or of a run without a syncer.
  """

  learner: int
  state: str = GONE  # JOINING, LIVE, GONE or LEFT.
  step: int | None = None  # Inner steps of this incarnation.
  steps: int | None = None  # Inner steps, over all incarnations.
  tokens: int | None = None  # Sum of those that it reported.
  loss: float | None = None  # Of the last reported step, nats per token.
  tokens_per_s: float | None = None
  round: int | None = None  # The newest that it offered for; 0: none yet.
  # Its base behind the fragment's version, at the last offer.
  lag_versions: int | None = None
  bytes_up: int | None = None  # Payload bytes pulled from it.
  bytes_down: int | None = None  # Payload bytes that it pulled.
  rounds: int | None = None  # Closed rounds that included it,
  participation: float | None = None  # and their share of all closed rounds.
  incarnations: int | None = None
  # When its newest process began, and the origin of its inner state.
  beginning: str = ''
  # Part of the time of its steps in which they waited for the exchange,
  stall_share: float | None = None
  stall_max_s: float | None = None  # and the longest such wait of one step.
  age_steps: float | None = None  # Mean age of its merged offers; None: none.
  link_load: float | None = None  # As in `messages.Report`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStatus:
  """The run, as the syncer sees it, while it goes on and at its end.

  `figures` computes from it what is shown. None: not known, as above.
  """

  run: str
  step: int  # t, the global step.
  learners: tuple[LearnerStatus, ...]  # In the order of their ids.
  time_s: float | None = None  # Seconds since the epoch at writing.
  total_steps: int | None = None
  rounds: int = 0  # Closed ones.
  planned: int | None = None  # M.
  fragments: int | None = None  # P.
  parameters: int | None = None  # Of the model.
  live: tuple[int, ...] = ()
  participants: tuple[int, ...] = ()  # Of the last closed round.
  quorum_s: float | None = None  # ξ_quorum, mean time from due to quorum.
  grace_s: float | None = None  # The last grace window.
  sync_s: float | None = None  # To pull and merge, in the last round.
  # Since the first learner was ready; at the end, until the last close.
  elapsed_s: float | None = None
  goodput: float | None = None  # As in `goodput.py`, over the same time.
  uptime: float | None = None
  pulls_up: int | None = None  # Payloads that the syncer pulled.
  pulls_down: int | None = None  # Payloads that learners pulled.
  bytes_up: int | None = None  # Bytes of those payloads.
  bytes_down: int | None = None
  refused: int | None = None  # Contributions not merged, over all causes.
  finished: bool = False
  age_steps: float | None = None  # Mean over all learners; see `metrics.ages`.
  old_share: float | None = None  # Share of merged offers; see `metrics.ages`.
  heldout_step: int | None = None  # Of the Θ that was evaluated last,
  heldout_loss: float | None = None  # and its loss, nats per token.


# Keys of older files -> fields.
_OLD_KEYS = {'closed_round': 'rounds', 'wall_s': 'elapsed_s'}


def as_json(status: RunStatus) -> dict:
  """Returns the fields of a status and all figures, by their names."""
  fields = _flat(status, figures.RUN)
  fields['learners'] = [_flat(x, figures.LEARNER) for x in status.learners]
  return files.finite(fields)


def _flat(value, table) -> dict:
  return {**files.plain(value), **figures.values(table, value)}


def write_status(path: pathlib.Path, status: RunStatus) -> None:
  """Replaces the file atomically; it is sealed."""
  text = json.dumps(as_json(status), allow_nan=False)
  files.replace(path, files.seal(text.encode()) + b'\n')


def read_status(path: pathlib.Path) -> RunStatus | None:
  """Returns the last status, None before the first; raises
  `files.MalformedFile`.
  """
  return files.read_json(path, RunStatus, _fields)


def _fields(record):
  """Leaves the fields of what `as_json` or an older version wrote."""
  if not isinstance(record, dict):
    return record
  record = _without(record, RunStatus, figures.RUN)
  learners = record.get('learners')
  if isinstance(learners, list):
    record['learners'] = [
      _without(row, LearnerStatus, figures.LEARNER)
      if isinstance(row, dict)
      else row
      for row in learners
    ]
  return record


def _without(record: dict, cls, table) -> dict:
  known = {field.name for field in dataclasses.fields(cls)}
  computed = {figure.name for figure in table} - known
  renamed = {_OLD_KEYS.get(key, key): value for key, value in record.items()}
  return {key: x for key, x in renamed.items() if key not in computed}


@dataclasses.dataclass(frozen=True)
class Accuracy:
  """Right answers as a share of all, with its 95 % interval."""

  right: int
  share: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class TaskScore:
  """A model's answers to the questions of one task file.

  Of dialogues there are no choices: only `exact` is not None.
  """

  file: str  # Name of the file.
  questions: int  # Number of questions.
  chance: float  # The share that guessing would answer rightly.
  cut: int  # Questions whose context was too long, and lost its beginning.
  # Score if the answer is the choice of highest log-likelihood.
  by_sum: Accuracy | None
  # Score if it is divided by the choice's length in bytes.
  by_byte: Accuracy | None
  # Answers that are drawn, the likeliest token at a time, and right in all.
  exact: Accuracy | None = None


def share(right: int, questions: int) -> Accuracy:
  """Returns the share and its interval by Wilson's formula.

  (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n): unlike p ± z √(p(1−p)/n)
  it is not empty if all answers are right, or none.

  Raises:
    ValueError: there are no questions, or more right answers than questions.
  """
  if not 0 <= right <= questions or not questions:
    raise ValueError(f'{right=} of {questions=}')
  p, z, n = right / questions, NORMAL_95, questions
  middle = p + z * z / (2 * n)
  spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  whole = 1 + z * z / n
  low, high = (middle - spread) / whole, (middle + spread) / whole
  # Rounding must not exclude a share of 0 or 1 from the interval.
  return Accuracy(right, p, max(0.0, min(low, p)), min(1.0, max(high, p)))


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Loss of the global model on held-out text, nats per token.

  A token is a byte if the tokenizer is 'bytes'. Fields with a default are
  missing in older files. None means not requested or not applicable: the loss
  of the quadratic model has no bits, and only a text in memory has bigrams.
  """

  parameters: int
  initial_loss: float
  final_loss: float
  bigram_loss: float | None  # Loss of a bigram model of the training text.
  unigram_loss: float | None
  initial_bits_per_byte: float | None = None
  final_bits_per_byte: float | None = None
  task: TaskScore | None = None  # Of the final model.
  bytes_per_token: float = 1.0  # Of the held-out text, on average.


def loss_rows(evaluation: Evaluation) -> list[tuple[str, float, float]]:
  """Returns what was measured: its name, nats per token, bits per byte."""
  rows = (
    ('at the start', evaluation.initial_loss),
    ('at the end', evaluation.final_loss),
    ('unigram entropy of the text', evaluation.unigram_loss),
    ('bigram entropy of the text', evaluation.bigram_loss),
  )
  return [
    (name, nats, bits(nats) / evaluation.bytes_per_token)
    for name, nats in rows
    if nats is not None
  ]


def task_lines(task: TaskScore) -> list[str]:
  """Returns a sentence for each way to score the answers."""
  return [
    f'{task.file}, by {how}: {x.share:.1%} of {task.questions} right '
    f'(95 %: {x.low:.1%} to {x.high:.1%}; by chance {task.chance:.0%})'
    for how, x in (
      ('sum', task.by_sum),
      ('byte', task.by_byte),
      ('exact match', task.exact),
    )
    if x is not None
  ]


def bits(nats: float) -> float:
  """Converts nats to bits."""
  return nats / math.log(2)


def write_summary(path: pathlib.Path, status: RunStatus) -> None:
  """Replaces the file atomically."""
  files.write_json(path, as_json(status))


def read_summary(path: pathlib.Path) -> RunStatus | None:
  """Returns the status at the end; None if the run did not finish.

  Raises:
    MalformedFile: it is not what a run writes.
  """
  return files.read_json(path, RunStatus, _summary_fields)


def _summary_fields(record):
  """Completes an older summary, which had fewer fields than a status."""
  record = _fields(record)
  if not isinstance(record, dict) or 'finished' in record:
    return record
  record = {'finished': True, 'total_steps': record.get('step'), **record}
  rounds = record.get('rounds')
  for row in record.get('learners') or ():
    if rounds and isinstance(row, dict) and 'rounds' in row:
      row['participation'] = figures.participation(row['rounds'], rounds)
  return record


def write_evaluation(path: pathlib.Path, evaluation: Evaluation) -> None:
  """Replaces the file atomically."""
  files.write_json(path, evaluation)


def read_evaluation(path: pathlib.Path) -> Evaluation | None:
  """Returns None if nothing was evaluated; raises `files.MalformedFile`."""
  return files.read_json(path, Evaluation)


def newest_heldout(workdir: Workdir) -> dict[str, float]:
  """Returns the fields of the last loss of Θ that the evaluator measured."""
  for record in jsonl.from_the_end(workdir.metrics(EVALUATOR)):
    loss = record.get(names.EVAL_LOSS)
    if loss is not None and math.isfinite(loss):
      return {'heldout_step': int(record['step']), 'heldout_loss': loss}
  return {}


def of_run(workdir: Workdir) -> RunStatus | None:
  """Returns the status of a run from its folder, going on or over.

  What an older version left out of the summary is taken from the last status.
  Once the run is over and its Θ evaluated, that loss is the held-out loss.
  None: nothing was written yet, or the run has no syncer.

  Raises:
    MalformedFile: a file is not what a run writes.
  """
  end, last = read_summary(workdir.summary), read_status(workdir.status)
  status = end or last
  if status is None:
    return None
  if end is not None and last is not None:
    by_id = {row.learner: row for row in last.learners}
    learners = tuple(
      _completed(row, by_id[row.learner]) if row.learner in by_id else row
      for row in end.learners
    )
    status = dataclasses.replace(_completed(end, last), learners=learners)
  evaluation = read_evaluation(workdir.evaluation) if status.finished else None
  if evaluation is None:
    return dataclasses.replace(status, **newest_heldout(workdir))
  return dataclasses.replace(
    status,
    parameters=evaluation.parameters,
    heldout_step=status.step,
    heldout_loss=evaluation.final_loss,
  )


def _completed(status, other):
  """Fills the fields that are not known."""
  defaults = {x.name: x.default for x in dataclasses.fields(status)}
  lacking = {
    name: getattr(other, name)
    for name, default in defaults.items()
    if getattr(status, name) == default
  }
  return dataclasses.replace(status, **lacking)
