# SPDX-License-Identifier: Apache-2.0
"""A run's final Θ, checked against the configured model, and its evaluation.

Of multiple-choice questions a model's answer is the likeliest. Suffixes of
arrays give their shape:
  B rows scored at once, L window.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from diloco.checkpoint.parameters import read_parameters
from diloco.data import corpus, text_windows
from diloco.data.dialogues import split_signed
from diloco.data.tasks import Question, read_dialogues, read_questions
from diloco.data.tokenizers import Tokenizer
from diloco.evaluation.sampling import Sampler
from diloco.metrics import status
from diloco.metrics.run_progress import counted
from diloco.metrics.workdir import Workdir
from diloco.models import api
from diloco.run import on_devices
from diloco.run.heldout import Heldout
from diloco.run.on_devices import OnDevices
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


def checked_language(model: api.Model, kind: str) -> api.Language:
  """Returns what scores texts and continues them.

  Raises:
    ValueError: the model gives no probabilities; names its kind.
  """
  language = api.language_of(model)
  if language is None:
    raise ValueError(
      f'model.kind={kind!r} is no language model: it has a loss, but no '
      'logits to draw text from or to score answers with'
    )
  return language


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
    task: a file of questions, or of dialogues, that the last one answers, too.
    say: takes how far it is.

  Raises:
    FileNotFoundError: there is no last Θ, or no task.
    ValueError: Θ is of another model, or the task can not be asked.
  """

  def counting(what: str) -> Callable[[Sequence], Iterable]:
    return lambda parts: counted(parts, say, lambda _: what)

  config, model = run_spec.config, run_spec.model
  window = config.data.seq_len
  dialogues = None if task is None else read_dialogues(task)
  if task is not None:
    language = checked_language(model, config.model.kind)
    tokenizer, vocab = run_spec.text.tokenizer, config.model.vocab
    if dialogues:
      asked = [asked_of(tokenizer.encode_dialogue(each)) for each in dialogues]
      check_asked(asked, window, vocab)
    else:
      questions = read_questions(task)
      rows = choice_rows(questions, tokenizer, window, vocab)
  final = final_parameters(run_spec, workdir)
  score = None
  if dialogues:
    right = exact_matches(
      language,
      on_devices.of_run(run_spec),
      final,
      asked,
      window,
      tokenizer.vocab,
      config.run.eval_batch,
      counting('batches of dialogues'),
    )
    score = status.TaskScore(
      file=task.name,
      questions=len(asked),
      chance=0.0,
      cut=0,
      by_sum=None,
      by_byte=None,
      exact=status.share(sum(right), len(asked)),
    )
  elif task is not None:
    sums = log_likelihoods(
      language,
      on_devices.of_run(run_spec),
      final,
      rows,
      config.run.eval_batch,
      counting('batches of choices'),
    )
    score = task_score(task.name, questions, rows, sums)
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
  if getattr(text.train, 'dtype', None) != np.uint8:
    return None, None
  return (
    corpus.bigram_entropy(text.train, text.heldout),
    corpus.unigram_entropy(text.train, text.heldout),
  )


# Dialogues --------------------------------------------------------------------


def asked_of(signed: np.ndarray) -> tuple[list[int], list[int]]:
  """Returns a dialogue's tokens up to its last answer, and those of that.

  Args:
    signed: as `Tokenizer.encode_dialogue` gives them.
  """
  tokens, counted = split_signed(signed)
  ends = np.flatnonzero(counted)
  stop = int(ends[-1]) + 1 if len(ends) else 0
  start = int(np.flatnonzero(counted[:stop] == 0)[-1]) + 1 if stop else 0
  return tokens[:start].tolist(), tokens[start:stop].tolist()


def check_asked(
  asked: Sequence[tuple[list[int], list[int]]], window: int, vocab: int
) -> None:
  """Raises ValueError for a dialogue that a model can not be asked."""
  for number, (prompt, answer) in enumerate(asked, 1):
    if not (prompt and 0 < len(answer) <= window - len(prompt)):
      raise ValueError(
        f'dialogue {number}: {len(prompt)} tokens and {len(answer)} of its '
        f'last answer, must be 1 each at least, and {window} in all at most, '
        'the length of the sequences that the model was trained on'
      )
    if (most := max(prompt + answer)) >= vocab:
      raise ValueError(
        f'dialogue {number}: has token {most}, the vocabulary of the model is '
        f'{vocab}'
      )


def exact_matches(
  language: api.Language,
  devices: OnDevices,
  params: Mapping[str, np.ndarray],
  asked: Sequence[tuple[list[int], list[int]]],
  window: int,
  vocab: int,
  at_once: int,
  walk: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[bool]:
  """Returns which answers are drawn to the last token, each the likeliest.

  Args:
    asked: prompts and answers, as `asked_of` gives them.
    window: L, tokens of a prompt and its answer at most.
    vocab: of the tokenizer; later tokens are never drawn.
    at_once: B, prompts that are continued at once.
    walk: yields the numbers that it is given, such as to say how far it is.
  """
  sampler = Sampler(language, devices, params, window, 0.0, 0, vocab)
  right: list[bool] = []
  for first in walk(range(0, len(asked), at_once)):
    batch = asked[first : first + at_once]
    # As in `log_likelihoods`: one compiled shape.
    filled = [*batch, *batch[:1] * (at_once - len(batch))]
    length = max(len(answer) for _, answer in batch)
    drawn = zip(*sampler.sample([prompt for prompt, _ in filled], length, 0))
    right += [
      list(tokens[: len(answer)]) == answer
      for tokens, (_, answer) in zip(drawn, batch)
    ]
  return right


# Questions --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ChoiceRow:
  """A choice after its context, as a model is asked about it.

  Attributes:
    tokens: int32 [L + 1], filled up with 0.
    is_choice: bool [L], whether tokens 1 … L are the choice's.
    is_cut: True if the context lost its beginning.
  """

  tokens: np.ndarray
  is_choice: np.ndarray
  is_cut: bool


def choice_rows(
  questions: Sequence[Question], tokenizer: Tokenizer, window: int, vocab: int
) -> list[ChoiceRow]:
  """Returns a row for each choice of each question, one after the other.

  A choice's tokens are those of context and choice together that follow as many
  as the context has alone. A context that does not fit into the window with its
  choice loses its beginning.

  Args:
    window: L, the number of tokens that the model sees.
    vocab: of the model.

  Raises:
    ValueError: a choice is longer than the window, has no token of its own, or
      one that is unknown to the model.
  """
  contexts = _encoded(tokenizer, [q.context for q in questions])
  rows = []
  for number, (question, context) in enumerate(zip(questions, contexts), 1):
    texts = [question.context + choice for choice in question.choices]
    for i, tokens in enumerate(_encoded(tokenizer, texts)):
      size = len(tokens) - len(context)
      if not (len(context) and 0 < size <= window):
        raise ValueError(
          f'question {number}, choices[{i}]: {size} tokens after '
          f'{len(context)} of its context, must be 1 … {window}, the length of '
          'the sequences that the model was trained on, after 1 at least'
        )
      if tokens.max() >= vocab:
        raise ValueError(
          f'question {number}, choices[{i}]: has token {tokens.max()}, the '
          f'vocabulary of the model is {vocab}'
        )
      rows.append(_row(tokens, size, window))
  return rows


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
  """Returns the texts' tokens, without an end."""
  return [x[:-1] for x in tokenizer.encode([t.encode() for t in texts])]


def _row(tokens: np.ndarray, size: int, window: int) -> ChoiceRow:
  """Returns the row whose last `size` tokens are the choice."""
  seen = tokens[-(window + 1) :]
  padded = np.zeros(window + 1, np.int32)
  padded[: len(seen)] = seen
  places = np.arange(1, window + 1)
  is_choice = (places >= len(seen) - size) & (places < len(seen))
  return ChoiceRow(padded, is_choice, len(seen) < len(tokens))


def log_likelihoods(
  language: api.Language,
  devices: OnDevices,
  params: Mapping[str, np.ndarray],
  rows: Sequence[ChoiceRow],
  at_once: int,
  walk: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[float]:
  """Returns Σ log p(token | all before it) over each choice, in nats.

  Args:
    at_once: B, choices scored at once.
    walk: yields the numbers that it is given, such as to say how far it is.
  """

  def score(params, tokens_BL, is_choice_BL):
    entropies_BL = language.entropies(params, tokens_BL)
    return -jnp.sum(jnp.where(is_choice_BL, entropies_BL, 0.0), axis=-1)

  score = devices.jit(score)
  placed = devices.place(params)
  sums: list[float] = []
  for first in walk(range(0, len(rows), at_once)):
    batch = rows[first : first + at_once]
    # The last batch is padded with its own first row: one compiled shape.
    filled = [*batch, *batch[:1] * (at_once - len(batch))]
    arrays = [
      np.stack([getattr(row, name) for row in filled])
      for name in ('tokens', 'is_choice')
    ]
    scored = score(placed, *devices.rows(arrays))
    sums += np.asarray(scored)[: len(batch)].tolist()
  return sums


def task_score(
  file: str,
  questions: Sequence[Question],
  rows: Sequence[ChoiceRow],
  sums: Sequence[float],
) -> status.TaskScore:
  """Counts the right answers; a tie for the likeliest choice is not right.

  Args:
    rows: those of the questions.
    sums: the log-likelihood of each.
  """
  right_by_sum = right_by_byte = cut = 0
  answered = iter(zip(rows, sums, strict=True))
  for question in questions:
    asked = [next(answered) for _ in question.choices]
    of_choices = [total for _, total in asked]
    sizes = [len(choice.encode()) for choice in question.choices]
    per_byte = [total / size for total, size in zip(of_choices, sizes)]
    right_by_sum += _is_right(of_choices, question.answer)
    right_by_byte += _is_right(per_byte, question.answer)
    cut += any(row.is_cut for row, _ in asked)
  count = len(questions)
  return status.TaskScore(
    file=file,
    questions=count,
    chance=float(np.mean([1 / len(q.choices) for q in questions])),
    cut=cut,
    by_sum=status.share(right_by_sum, count),
    by_byte=status.share(right_by_byte, count),
  )


def _is_right(values: Sequence[float], answer: int) -> bool:
  others = [value for i, value in enumerate(values) if i != answer]
  return values[answer] > max(others)
