# SPDX-License-Identifier: Apache-2.0
"""A run's final Θ, checked against the configured model, and its evaluation.

Of multiple-choice questions a model's answer is the likeliest. Suffixes of
arrays give their shape:
  B rows scored at once, L window, V vocab.
"""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.checkpoint.parameters import read_parameters
from diloco.data import corpus, text_windows
from diloco.data.corpus import check_is_of_bytes
from diloco.data.tasks import Question, read_questions
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
  shapes = {path: x.shape for path, x in params.items()}
  for path in sorted(wanted.keys() | shapes.keys()):
    if wanted.get(path) != shapes.get(path):
      raise ValueError(
        f'{workdir.parameters}: {path!r} is {_shape(shapes.get(path))}, in the '
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
  say: Callable[[str], None] = lambda line: None,
) -> status.Evaluation:
  """Evaluates the first and the last Θ of a run.

  Args:
    task: a file of questions that the last one answers, too.
    say: takes how far it is.

  Raises:
    FileNotFoundError: there is no last Θ, or no task.
    ValueError: Θ is of another model, or the task can not be asked.
  """

  def counting(what: str) -> Callable[[Sequence], Iterable]:
    return lambda parts: counted(parts, say, lambda _: what)

  config, model = run_spec.config, run_spec.model
  window = config.data.seq_len
  if task is not None:
    check_has_logits(model, config.model.kind)
    check_is_of_bytes(run_spec.text, f'--task={task}')
    questions = read_questions(task, config.model.vocab, window)
  final = final_parameters(run_spec, workdir)
  score = None
  if task is not None:
    likelihoods = log_likelihoods(
      model,
      final,
      questions,
      window,
      config.run.eval_batch,
      counting('batches of choices'),
    )
    score = task_score(task.name, questions, likelihoods, window)
  heldout = Heldout(run_spec)
  first = run_spec.initial_parameters()
  initial_loss = heldout.loss(first, counting('batches, of the first Θ'))
  final_loss = heldout.loss(final, counting('batches, of the last Θ'))
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
    task=score,
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


# Questions --------------------------------------------------------------------


def log_likelihoods(
  model: api.Model,
  params: Mapping[str, np.ndarray],
  questions: Sequence[Question],
  window: int,
  rows: int,
  walk: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[list[float]]:
  """Returns Σ log p(byte | all before it) over each choice's bytes, in nats.

  A context that does not fit into the window with its choice loses its
  beginning.

  Args:
    questions: every choice has at most `window` bytes.
    window: L, the number of bytes that the model sees.
    rows: B, choices scored at once.
    walk: yields the numbers that it is given, such as to say how far it is.

  Returns:
    For each question, the sum of each choice.
  """

  @jax.jit
  def score(params, tokens_BL, targets_BL, is_choice_BL):
    logits_BLV = model.logits(api.unflatten(params), tokens_BL)
    chances_BLV = jax.nn.log_softmax(logits_BLV.astype(jnp.float32), axis=-1)
    picked_BL1 = jnp.take_along_axis(
      chances_BLV, targets_BL[..., None], axis=-1
    )
    return jnp.sum(jnp.where(is_choice_BL, picked_BL1[..., 0], 0.0), axis=-1)

  placed = {path: jnp.asarray(x) for path, x in params.items()}
  encoded = [
    _row(question.context.encode(), choice.encode(), window)
    for question in questions
    for choice in question.choices
  ]
  summed: list[float] = []
  for first in walk(range(0, len(encoded), rows)):
    batch = encoded[first : first + rows]
    # The last batch is padded with its own first row: one compiled shape.
    filled = batch + batch[:1] * (rows - len(batch))
    scored = score(placed, *(np.stack(part) for part in zip(*filled)))
    summed += np.asarray(scored)[: len(batch)].tolist()
  answered = iter(summed)
  return [[next(answered) for _ in q.choices] for q in questions]


def task_score(
  file: str,
  questions: Sequence[Question],
  likelihoods: Sequence[Sequence[float]],
  window: int,
) -> status.TaskScore:
  """Counts the right answers; a tie for the likeliest choice is not right."""
  right_by_sum = right_by_byte = cut = 0
  for question, sums in zip(questions, likelihoods):
    sizes = [len(choice.encode()) for choice in question.choices]
    per_byte = [total / size for total, size in zip(sums, sizes)]
    right_by_sum += _is_right(sums, question.answer)
    right_by_byte += _is_right(per_byte, question.answer)
    cut += len(question.context.encode()) + max(sizes) > window + 1
  count = len(questions)
  return status.TaskScore(
    file=file,
    questions=count,
    chance=float(np.mean([1 / len(q.choices) for q in questions])),
    cut=cut,
    by_sum=status.share(right_by_sum, count),
    by_byte=status.share(right_by_byte, count),
  )


def _row(
  context: bytes, choice: bytes, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns tokens, next tokens, and the mask of the choice's; all [L]."""
  if not (context and 0 < len(choice) <= window):
    raise ValueError(
      f'a choice of {len(choice)} bytes after {len(context)} of context, the '
      f'window has {window}'
    )
  text = np.frombuffer(context + choice, np.uint8)[-(window + 1) :]
  padded = np.zeros(window + 1, np.int32)
  padded[: len(text)] = text
  positions = np.arange(1, window + 1)
  is_choice = (positions >= len(text) - len(choice)) & (positions < len(text))
  return padded[:-1], padded[1:], is_choice


def _is_right(values: Sequence[float], answer: int) -> bool:
  others = [value for i, value in enumerate(values) if i != answer]
  return values[answer] > max(others)
