# SPDX-License-Identifier: Apache-2.0
"""Results at the end of a run: `summary.json`, `evaluation.json`."""

import dataclasses
import math
import pathlib

from diloco.metrics import files, scores


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
  task: scores.TaskScore | None = None  # Of the final model.
  bytes_per_token: float = 1.0  # Of the held-out text, on average.


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
  """Returns None if the run did not finish; raises `files.Malformed`."""
  return files.read_json(path, RunSummary)


def write_evaluation(path: pathlib.Path, evaluation: Evaluation) -> None:
  """Replaces the file atomically."""
  files.write_json(path, evaluation)


def read_evaluation(path: pathlib.Path) -> Evaluation | None:
  """Returns None if nothing was evaluated; raises `files.Malformed`."""
  return files.read_json(path, Evaluation)
