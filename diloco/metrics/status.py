# SPDX-License-Identifier: Apache-2.0
"""`status.json`, `summary.json` and `evaluation.json` of a run.

The syncer replaces the file about once a second and once more at the end; the
launcher's table reads it. It does not influence training.
"""

import dataclasses
import json
import math
import operator
import pathlib
import typing
from collections.abc import Callable

from diloco.metrics import files, names

# States of a learner, as the syncer sees it.
JOINING = 'joining'  # Said hello, bootstrap not complete.
LIVE = 'live'  # Counts for the quorum.
GONE = 'gone'  # Its incarnation ended; none has come since.
LEFT = 'left'  # Said goodbye.
# Kinds of a line of the syncer's tape that count as refusals.
REFUSALS = ('refused', 'zombie', 'pull_failed', 'stale', 'late', 'outlier')
NORMAL_95 = 1.959964  # 95 % of a normal distribution lie within so many σ.


@dataclasses.dataclass(frozen=True)
class LearnerStatus:
  """The status of one learner, over all its incarnations."""

  learner: int
  state: str  # JOINING, LIVE, GONE or LEFT.
  step: int  # Inner steps of this incarnation.
  loss: float | None  # Of the last reported step, nats per token.
  tokens_per_s: float
  round: int  # The newest round that it offered for; 0 before the first.
  # Its base behind the fragment's version, at the last offer.
  lag_versions: int
  bytes_up: int  # Payload bytes pulled from it.
  bytes_down: int  # Payload bytes that it pulled.
  participation: float  # Share of the closed rounds that included it.
  incarnations: int
  stall_max_s: float  # The longest stall of one step.
  # Mean age of its merged offers; None: none, or an older file.
  age_steps: float | None = None


@dataclasses.dataclass(frozen=True)
class RunStatus:
  """The run, as the syncer sees it."""

  run: str
  time_s: float  # Seconds since the epoch at writing.
  step: int  # t, the global step.
  total_steps: int
  closed_round: int
  live: tuple[int, ...]
  participants: tuple[int, ...]  # Of the last closed round.
  quorum_s: float  # ξ_quorum, mean time from due to quorum.
  grace_s: float  # The last grace window.
  sync_s: float  # To pull and merge, in the last round.
  goodput: float  # As in `goodput.py`, since the first learner was ready.
  uptime: float
  bytes_up: int
  bytes_down: int
  refused: int  # Contributions that were not merged, over all causes.
  finished: bool
  learners: tuple[LearnerStatus, ...]  # In the order of their ids.
  age_steps: float | None = None  # Mean over all learners; see `metrics.ages`.
  old_share: float | None = None  # Share of merged offers; see `metrics.ages`.


def write_status(path: pathlib.Path, status: RunStatus) -> None:
  """Replaces the file atomically; it is sealed."""
  text = json.dumps(files.plain(status), allow_nan=False)
  files.replace(path, files.seal(text.encode()) + b'\n')


@dataclasses.dataclass(frozen=True)
class Metric:
  """One figure of a run or of a learner, as `/metrics` and curves show it."""

  # Computes it from the status; None: it is not known.
  value: Callable[[typing.Any], float | None]
  kind: str  # 'gauge' or 'counter', as Prometheus has it.
  meaning: str  # The help text of `/metrics`.
  # Its name among the scalars, over the global step; None: no curve.
  curve: str | None = None


def _participation(status: RunStatus) -> float | None:
  shares = [each.participation for each in status.learners]
  return sum(shares) / len(shares) if shares else None


def _field(name: str, *described: str) -> Metric:
  return Metric(operator.attrgetter(name), *described)


# Metrics of a `RunStatus`, by their names in the format of Prometheus.
RUN_METRICS = {
  'global_step': _field('step', 'gauge', 'Global step t.'),
  'total_steps': _field('total_steps', 'gauge', 'Global steps of the run.'),
  'rounds_total': _field('closed_round', 'counter', 'Closed rounds.'),
  'goodput_ratio': _field(
    'goodput', 'gauge', 'Useful over allocated time.', names.GOODPUT
  ),
  'uptime_ratio': _field(
    'uptime', 'gauge', 'Time with a learner that steps.', names.UPTIME
  ),
  'participation_ratio': Metric(
    _participation,
    'gauge',
    'Mean share of the closed rounds that merged a learner.',
    names.PARTICIPATION,
  ),
  'grace_seconds': _field('grace_s', 'gauge', 'The last grace window.'),
  'offer_age_steps': _field(
    'age_steps', 'gauge', 'Mean age of merged offers.', names.OFFER_AGE
  ),
  'received_bytes_total': _field(
    'bytes_up', 'counter', 'Payloads of learners.'
  ),
  'sent_bytes_total': _field('bytes_down', 'counter', 'Payloads to learners.'),
  'refused_total': _field(
    'refused', 'counter', 'Contributions not merged.', names.REFUSED
  ),
  'learners_live': Metric(
    lambda status: len(status.live), 'gauge', 'Live learners.', names.LIVE
  ),
  'status_time_seconds': _field('time_s', 'gauge', 'When the syncer said so.'),
}
# Metrics of a `LearnerStatus`; they have no curves.
LEARNER_METRICS = {
  'learner_step': _field('step', 'gauge', 'Inner steps of this incarnation.'),
  'learner_loss': _field('loss', 'gauge', 'Training loss, nats per token.'),
  'learner_tokens_per_second': _field(
    'tokens_per_s', 'gauge', 'Tokens a second.'
  ),
  'learner_participation_ratio': _field(
    'participation', 'gauge', 'Share of the closed rounds that merged it.'
  ),
  'learner_offer_age_steps': _field(
    'age_steps', 'gauge', 'Mean age of its merged offers.'
  ),
  'learner_stall_max_seconds': _field(
    'stall_max_s', 'gauge', 'The longest stall of a step.'
  ),
  'learner_incarnations_total': _field(
    'incarnations', 'counter', 'Incarnations.'
  ),
}


def scalars(status: RunStatus) -> dict[str, float]:
  """Returns what of a status is a curve over the global step."""
  found = {
    metric.curve: metric.value(status)
    for metric in RUN_METRICS.values()
    if metric.curve is not None
  }
  known = {name: value for name, value in found.items() if value is not None}
  return {names.TIME: status.time_s, **known}


def read_status(path: pathlib.Path) -> RunStatus | None:
  """Returns the last status, None before the first; raises
  `files.MalformedFile`.
  """
  return files.read_json(path, RunStatus)


@dataclasses.dataclass(frozen=True)
class Accuracy:
  """Right answers as a share of all, with its 95 % interval."""

  right: int
  share: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class TaskScore:
  """A model's answers to the questions of one task file."""

  file: str  # Name of the file.
  questions: int  # Number of questions.
  chance: float  # The share that guessing would answer rightly.
  cut: int  # Questions whose context was too long, and lost its beginning.
  # Score if the answer is the choice of highest log-likelihood.
  by_sum: Accuracy
  by_byte: Accuracy  # Score if it is divided by the choice's length in bytes.


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
class LearnerSummary:
  """The summary of one learner, over all its incarnations."""

  learner: int
  steps: int  # Inner steps, over all incarnations.
  tokens: int
  rounds: int  # Closed rounds that included it.
  incarnations: int
  # When its newest process began, and the origin of its inner state.
  beginning: str
  stall_max_s: float
  bytes_up: int
  bytes_down: int
  age_steps: float | None = None  # As in `metrics.status`.


@dataclasses.dataclass(frozen=True)
class RunSummary:
  """Written by the syncer as its last act; its presence means 'finished'."""

  run: str
  step: int  # t, the global step at the end.
  rounds: int  # Closed ones.
  fragments: int  # P.
  wall_s: float  # From the first ready learner to the last close.
  goodput: float
  uptime: float
  refused: int
  pulls_up: int  # Payloads that the syncer pulled and could use.
  pulls_down: int  # Payloads that learners pulled.
  bytes_up: int  # Bytes of those payloads.
  bytes_down: int
  learners: tuple[LearnerSummary, ...]  # In the order of their ids.
  age_steps: float | None = None  # As in `metrics.status`.
  old_share: float | None = None


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
    f'{task.file}, by {how}: {found.share:.1%} of {task.questions} right '
    f'(95 %: {found.low:.1%} to {found.high:.1%}; by chance {task.chance:.0%})'
    for how, found in (('sum', task.by_sum), ('byte', task.by_byte))
  ]


def bits(nats: float) -> float:
  """Converts nats to bits."""
  return nats / math.log(2)


def bytes_per_parameter(
  pulled_bytes: int, pulls: int, fragments: int, parameters: int
) -> float | None:
  """Returns bytes per parameter one way, for one round trip of all P fragments.

  One pull carries one of P fragments, so P pulls carry every parameter once;
  f32 needs 4, bf16 needs 2. None if nothing was pulled.
  """
  if not pulls:
    return None
  return pulled_bytes * fragments / (pulls * parameters)


def write_summary(path: pathlib.Path, summary: RunSummary) -> None:
  """Replaces the file atomically."""
  files.write_json(path, summary)


def read_summary(path: pathlib.Path) -> RunSummary | None:
  """Returns None if the run did not finish; raises `files.MalformedFile`."""
  return files.read_json(path, RunSummary)


def write_evaluation(path: pathlib.Path, evaluation: Evaluation) -> None:
  """Replaces the file atomically."""
  files.write_json(path, evaluation)


def read_evaluation(path: pathlib.Path) -> Evaluation | None:
  """Returns None if nothing was evaluated; raises `files.MalformedFile`."""
  return files.read_json(path, Evaluation)
