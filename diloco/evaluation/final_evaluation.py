# SPDX-License-Identifier: Apache-2.0
"""A run's final Θ, checked against the configured model, and its evaluation."""

import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from diloco.checkpoint.parameters import read_parameters
from diloco.data import corpus, text_windows
from diloco.data.corpus import check_is_of_bytes
from diloco.data.tasks import read_questions
from diloco.evaluation import multiple_choice
from diloco.metrics import status
from diloco.metrics.run_progress import counted
from diloco.metrics.workdir import Workdir
from diloco.models import api
from diloco.run.heldout import Heldout
from diloco.run.spec import RunSpec


def final_parameters(
  run_spec: RunSpec, workdir: Workdir
) -> dict[str, np.ndarray]:
  """Returns path -> f32 array, as the syncer wrote them when the run ended.

  Raises:
    FileNotFoundError: the run has not written any (yet).
    ValueError: they belong to another model.
  """
  params = read_parameters(workdir.parameters)
  wanted = {path: spec.shape for path, spec in run_spec.specs.items()}
  found = {path: x.shape for path, x in params.items()}
  for path in sorted(wanted.keys() | found.keys()):
    if wanted.get(path) != found.get(path):
      raise ValueError(
        f'{workdir.parameters}: {path!r} is {_shape(found.get(path))}, in the '
        f'model of --config {_shape(wanted.get(path))}; is it the config of '
        'this run?'
      )
  return params


def check_has_logits(model: api.Model, kind: str) -> None:
  """Checks that a model has `logits`, without which it gives no probabilities.

  Raises:
    ValueError: it has none; names the kind of model.
  """
  if model.logits is None:
    raise ValueError(
      f'model.kind={kind!r} is no language model: it has a loss, but no '
      'logits to draw text from or to score answers with'
    )


def _shape(shape: tuple[int, ...] | None) -> str:
  return 'absent' if shape is None else f'of shape {list(shape)}'


def evaluated(
  run_spec: RunSpec,
  workdir: Workdir,
  task: pathlib.Path | None = None,
  say: Callable[[str], None] = lambda said: None,
) -> status.Evaluation:
  """Evaluates the first and the last Θ of a run.

  Args:
    task: a file of questions that the last one answers, too.
    say: takes how far it is.

  Raises:
    FileNotFoundError: there is no last Θ, or no task.
    ValueError: Θ is of another model, or the task can not be asked.
  """

  def each(what: str) -> Callable[[Sequence], Iterable]:
    return lambda parts: counted(parts, say, lambda _: what)

  config, model = run_spec.config, run_spec.model
  window = config.data.seq_len
  if task is not None:
    check_has_logits(model, config.model.kind)
    check_is_of_bytes(run_spec.text, f'--task={task}')
    questions = read_questions(task, config.model.vocab, window)
  final = final_parameters(run_spec, workdir)
  task_score = None
  if task is not None:
    likelihoods = multiple_choice.log_likelihoods(
      model,
      final,
      questions,
      window,
      config.run.eval_batch,
      each('batches of choices'),
    )
    task_score = multiple_choice.task_score(
      task.name, questions, likelihoods, window
    )
  heldout = Heldout(run_spec)
  first = run_spec.initial_parameters()
  initial_loss = heldout.loss(first, each('batches, of the first Θ'))
  final_loss = heldout.loss(final, each('batches, of the last Θ'))
  say('counts pairs of tokens')
  bigram_loss, unigram_loss = _entropies(run_spec.text)
  bytes_per_token = text_windows.bytes_per_token(run_spec.text.heldout)

  def bits(loss: float) -> float | None:
    """Per byte; the loss of a bowl is no cross-entropy."""
    return status.bits(loss) / bytes_per_token if model.logits else None

  return status.Evaluation(
    parameters=run_spec.parameters,
    initial_loss=initial_loss,
    final_loss=final_loss,
    bigram_loss=bigram_loss,
    unigram_loss=unigram_loss,
    initial_bits_per_byte=bits(initial_loss),
    final_bits_per_byte=bits(final_loss),
    task=task_score,
    bytes_per_token=bytes_per_token,
  )


def _entropies(text: corpus.Corpus) -> tuple[float | None, float | None]:
  """Returns the bigram and unigram entropies of a text in memory."""
  if not isinstance(text.train, np.ndarray):
    return None, None
  return (
    corpus.bigram_entropy(text.train, text.heldout),
    corpus.unigram_entropy(text.train, text.heldout),
  )
