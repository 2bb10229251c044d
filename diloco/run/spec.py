# SPDX-License-Identifier: Apache-2.0
"""Everything that follows from a run's configuration alone.

Learners and syncer build it independently and compare its fingerprints.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import logging

from diloco.checkpoint.parameters import read_parameters
from diloco.config import own_code, run_config
from diloco.data import corpus, text_windows
from diloco.data.paths import Watch, unwatched
from diloco.data.sources import IN_MEMORY
from diloco.data.tokenizers import make_tokenizer
from diloco.models import api
from diloco.models.decoder_config import DecoderConfig
from diloco.models.kinds import GIVEN, KINDS, sizes_of
from diloco.numerics import merge
from diloco.numerics.codec import Codec
from diloco.numerics.fragments import (
  Layout,
  Piece,
  TensorSpec,
  make_layout,
  take,
)
from diloco.numerics.schedule import PROGRESS, make_schedule
from diloco.numerics.shard_assignment import ShardAssignment, shards_of
from diloco.run import choices
from diloco.run.initial_weights import InitialWeights, open_weights

if TYPE_CHECKING:
  from diloco.data import pipeline

FULL = 'f32'  # The codec of a full fragment.
INITIAL = 'initial'  # In the folder `model.given`: the parameters.


WEIGHTS = 'initial parameters'  # What their fingerprint is called.
ORDER = 'rows by turns'  # How `data.pipeline` deals rows to learners.


@dataclasses.dataclass(frozen=True)
class RunSpec:
  """One run's model, text, layout, codecs and optimizers."""

  config: run_config.RunConfig
  model: api.Model
  specs: dict[str, TensorSpec]  # Path -> shape and role of what is trained.
  # Path -> shape and dtype of what is not: of LoRA all but the adapters.
  frozen: dict[str, jax.ShapeDtypeStruct]
  layout: Layout
  owners: ShardAssignment  # Which shard of the syncer owns which piece.
  text: corpus.Corpus  # Training and held-out text.
  up: Codec  # Codec of a learner's delta to its base.
  down: Codec  # Codec of the outer update.
  full: Codec  # Codec of a whole fragment.
  inner: Any  # The inner optimizer, a transformation of optax.
  outer: Any  # The outer one, of each fragment.
  # Of all pieces but embeddings, and of these.
  merge_rules: tuple[merge.Rule, merge.Rule]
  # Those of all parameters, or of `frozen` if there are any: then what is
  # trained is drawn from the seed, as it is if this is None.
  weights: InitialWeights | None = None

  @property
  def fingerprints(self) -> dict[str, str]:
    """Settings that syncer and learners must share, by name.

    Every value of the configuration is included in full, so that a refusal can
    name the key that differs.
    """
    agreed = {
      **run_config.agreement(self.config),
      'layout': self.layout.fingerprint(),
      'data': f'{self.text.fingerprint[:16]}, {ORDER}',
    }
    if self.weights is not None:
      agreed[WEIGHTS] = self._weights_fingerprint
    return agreed

  @functools.cached_property
  def _weights_fingerprint(self) -> str:
    return self.weights.fingerprint(self.read_shapes)

  @property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Path -> shape of each parameter that is trained."""
    return {path: spec.shape for path, spec in self.specs.items()}

  @property
  def all_shapes(self) -> dict[str, tuple[int, ...]]:
    """Path -> shape of each parameter, frozen ones included."""
    return self.shapes | {path: x.shape for path, x in self.frozen.items()}

  @property
  def read_shapes(self) -> dict[str, tuple[int, ...]]:
    """Path -> shape of each parameter that `weights` have."""
    return read_shapes(self.specs, self.frozen)

  @property
  def is_drawn(self) -> bool:
    """Whether what is trained begins as drawn from the seed."""
    return self.weights is None or bool(self.frozen)

  @property
  def parameters(self) -> int:
    """The number of scalar parameters of the model."""
    return sum(self.layout.sizes)

  def schedule(self) -> Callable[[float], float]:
    """The inner learning rate by progress."""
    inner = self.config.inner
    return make_schedule(
      inner.schedule,
      inner.lr,
      inner.warmup_steps,
      self.config.protocol.total_steps,
      inner.final_fraction,
    )

  @property
  def limits(self) -> run_config.RunLimits:
    """Limits on the run's processes."""
    config = self.config
    return run_config.limits_of(
      config.protocol.learners, config.data.shards, config.syncer.shards
    )

  def progress(self, global_step: int, own_steps: int) -> int:
    """Returns the schedule's argument: t, or the learner's own steps.

    Own steps are the rows taken of the data shard, by those of a batch. The
    syncer knows the rows, so a learner that lost its disk continues from there.
    """
    return PROGRESS[self.config.inner.progress](global_step, own_steps)

  def dataset(self, learner: int, learners: int = 0) -> 'pipeline.Dataset':
    """The rows of one learner id; `learners`: M, if it is not the run's."""
    # Not at the top: the syncer, which reads no batch, does without Grain.
    from diloco.data import pipeline

    data = self.config.data
    return pipeline.make_dataset(
      self.text.train,
      data.seq_len,
      learners or self.config.protocol.learners,
      learner,
      self.config.seed,
    )

  def initial_parameters(self) -> dict[str, np.ndarray]:
    """Returns the parameters that the run begins with: path -> f32 array.

    Drawn from the run's seed on the CPU, read from `model.init_from`, or given.
    The syncer's; a learner makes its own where they lie, to the same bits on
    CPU devices, and of weights that are read on all (`LearnerPrograms.draw`).
    """
    if self.config.model.kind == GIVEN:
      folder = pathlib.Path(self.config.model.given)
      return read_parameters(folder / INITIAL)
    if not self.is_drawn:
      return self.weights.whole(self.shapes)
    with jax.default_device(jax.local_devices(backend='cpu')[0]):
      drawn = jax.jit(lambda key: self.draw(key, self.specs))
      params = drawn(jax.random.key(self.config.seed))
      return {path: np.asarray(x, np.float32) for path, x in params.items()}

  def draw(
    self, key: jax.Array, paths: Collection[str]
  ) -> dict[str, jax.Array]:
    """Returns some of what the model's `init` draws: path -> array."""
    assert not self.config.model.init_from or self.frozen, 'weights not opened'
    flat = api.flatten(self.model.init(key))
    return {path: flat[path] for path in flat if path in paths}

  def initial_fragments(
    self, pieces: Sequence[Sequence[Piece]] | None = None
  ) -> list[dict[str, np.ndarray]]:
    """Returns the initial parameters by fragment: piece name -> array.

    Args:
      pieces: those that are wanted of each fragment; None: all. Of weights that
        are read, others are not.
    """
    pieces = self.layout.fragments if pieces is None else pieces
    if self.is_drawn:
      return self.fragments_of(self.initial_parameters(), pieces)
    fragments = [{} for _ in pieces]
    # Path by path: what is stored is read once.
    for each, fragment in sorted(
      ((x, p) for p, of_fragment in enumerate(pieces) for x in of_fragment),
      key=lambda item: item[0].path,
    ):
      box = each.box(self.specs[each.path].shape)
      values = self.weights.read(each.path, box).reshape(each.shape)
      fragments[fragment][each.name] = np.asarray(values, order='C')
    return fragments

  def fragments_like(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Returns the shapes of `initial_fragments`, without drawing them."""
    return [
      {x.name: jax.ShapeDtypeStruct(x.shape, np.float32) for x in pieces}
      for pieces in self.layout.fragments
    ]

  def fragments_of(
    self,
    params: Mapping[str, np.ndarray],
    pieces: Sequence[Sequence[Piece]] | None = None,
  ) -> list[dict[str, np.ndarray]]:
    """Returns path -> array cut into fragments: piece name -> array.

    The pieces are views, where they lie contiguously.

    Args:
      pieces: those that are wanted of each fragment; None: all.
    """
    return [
      {name: np.asarray(x, order='C') for name, x in take(params, p).items()}
      for p in (self.layout.fragments if pieces is None else pieces)
    ]


def make_run_spec(
  config: run_config.RunConfig,
  model: api.Model | None = None,
  reads_text: bool = True,
  reads_weights: bool = True,
) -> RunSpec:
  """Builds the `RunSpec` of a run without touching a device.

  Args:
    model: replaces the model that `config.model` describes.
    reads_text: False replaces the text by an empty one, for compiling only.
    reads_weights: False leaves `model.init_from` alone, for what needs no
      initial parameters; nor do they where no text is read.

  Raises:
    ValueError: the model cannot be cut as configured, or the text is too short,
      or a function of the user's own cannot be found or gives what is invalid,
      or `model.init_from` has no parameters of this model.
    FileNotFoundError: the text or `model.init_from` is missing.
  """
  # The text comes first: it is what is most often missing.
  text = None
  if reads_text:
    text = load_text(config)
    check_text(config, text)
  model = model or choices.model(config)
  shapes = api.check_model(model)
  specs = {
    path: TensorSpec(tuple(leaf.shape), model.roles[path])
    for path, leaf in shapes.items()
    if model.roles[path] != api.FROZEN
  }
  frozen = {path: x for path, x in shapes.items() if path not in specs}
  weights = None
  if reads_text and reads_weights:
    weights = open_weights(config.model, read_shapes(specs, frozen))

  layout = make_layout(
    specs,
    config.fragments.scheme,
    config.protocol.fragments,
    config.fragments.embedding,
  )

  choices.blend(config.protocol)  # A user's own is checked; learners make it.
  return RunSpec(
    config=config,
    model=model,
    specs=specs,
    frozen=frozen,
    layout=layout,
    owners=shards_of(layout, config.syncer.shards),
    text=text,
    up=config.codec.make(config.codec.up),
    down=config.codec.make(config.codec.down),
    full=config.codec.make(FULL),
    inner=choices.inner(config.inner, specs, model.axes),
    outer=choices.outer(config),
    merge_rules=choices.merge_rules(config),
    weights=weights,
  )


def read_shapes(
  specs: Mapping[str, TensorSpec], frozen: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, tuple[int, ...]]:
  """Returns path -> shape of what is read: what is frozen, if anything is."""
  return {path: tuple(x.shape) for path, x in (frozen or specs).items()}


def decoder_config(config: run_config.RunConfig) -> DecoderConfig:
  """Returns the decoder's dimensions from the section `model`.

  Raises:
    ValueError: the section describes another kind of model.
  """
  sizes = sizes_of(config.model)
  if sizes is None:
    names = ' or '.join(
      repr(name) for name, kind in KINDS.items() if kind.sizes
    )
    raise ValueError(f'model.kind={config.model.kind!r}: this takes {names}')
  return sizes


def check_text(config: run_config.RunConfig, text: corpus.Corpus) -> None:
  """Rejects a text on which the run could not be trained or evaluated.

  Raises:
    ValueError: it is too short; the message says what is needed.
  """
  data = config.data
  source = IN_MEMORY.get(data.source)
  if source is not None and source.is_elsewhere:
    return
  text_windows.check_windows(text.train, data.seq_len, data.batch, data.shards)
  text_windows.heldout_shape(
    text.heldout, data.seq_len, config.run.eval_batch, config.run.eval_batches
  )


def load_text(
  config: run_config.RunConfig,
  say: Callable[[str], None] = logging.info,
  watch: Watch = unwatched,
) -> corpus.Corpus:
  """Loads the corpus of the configuration's section `data`.

  Files of documents are indexed by the first process that needs them.

  Args:
    say: takes a line for each file that is indexed.
    watch: takes how many documents of a source are indexed.

  Raises:
    FileNotFoundError: it does not exist; the message names the path.
    ValueError: files are malformed, a package that reads them is missing, the
      model's vocabulary is smaller than the tokenizer's, or a source of the
      user's own cannot be found or gives what is no corpus.
  """
  data = config.data
  if own_code.parts(data.source):
    return own_code.make(
      'data.source',
      data.source,
      data,
      config.seed,
      check=lambda made: corpus.check_corpus(made, config.model.vocab),
    )
  if data.source in IN_MEMORY:
    return IN_MEMORY[data.source].load(data, config.seed)
  tokenizer = make_tokenizer(data.tokenizer, data.end_token)
  # Fail before hours are spent on an index.
  if config.model.vocab < tokenizer.vocab:
    raise ValueError(
      f'model.vocab={config.model.vocab}: data.tokenizer={data.tokenizer!r} '
      f'has {tokenizer.vocab} tokens, the model must know them all'
    )
  return corpus.section_corpus(data, tokenizer, say, watch)
