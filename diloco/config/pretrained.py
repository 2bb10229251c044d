# SPDX-License-Identifier: Apache-2.0
"""The folder that `model.init_from` names, and the configuration in it.

  hf:FOLDER       a model of Hugging Face: config.json and *.safetensors
  RUN             the folder of a run that is over, or was one of the lab
  RUN/parameters  the parameters alone

Imports no jax: launchers look here, too.
"""

import dataclasses
import json
import pathlib
import shutil

from diloco.config.sections import ModelConfig, defaults
from diloco.models import hf_format
from diloco.models.kinds import sizes_of

HF = 'hf:'
CONFIG = 'config.json'
PARAMETERS = 'parameters'  # As `metrics.workdir` has it; a test compares.
KEPT = 'pretrained'  # Likewise.
TOKENIZER = 'tokenizer.json'
MODEL = 'tokenizer.model'  # Of sentencepiece.
# What is kept of a folder of Hugging Face, for the export of the run.
OF_TOKENIZER = (
  TOKENIZER,
  'tokenizer_config.json',
  MODEL,
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'chat_template.json',
  'generation_config.json',
)
FILES = (CONFIG, *OF_TOKENIZER)
# Of the optimizer when a run begins with `--from` and no rate is given: that of
# experiments/train.py is for small models that know nothing yet.
LEARNING_RATE = 5e-5
LORA_LEARNING_RATE = 5e-4  # Adapters take ten times that of all parameters.


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A value of `model.init_from` that is not ''."""

  value: str

  @property
  def is_hf(self) -> bool:
    """True for a folder of Hugging Face."""
    return self.value.startswith(HF)

  @property
  def folder(self) -> pathlib.Path:
    """The folder of the weights: *.safetensors, or parameters of ours."""
    path = pathlib.Path(self.value.removeprefix(HF)).expanduser()
    if self.is_hf or path.name == PARAMETERS:
      return path
    return path / PARAMETERS

  @property
  def files(self) -> pathlib.Path:
    """The folder of config.json and of the tokenizer's files."""
    return self.folder if self.is_hf else self.folder.parent / KEPT

  def problem(self, what: object) -> ValueError:
    """Returns an error that names the key and its value."""
    return ValueError(f'model.init_from={self.value!r}: {what}')

  def check_folder(self) -> None:
    """Raises FileNotFoundError if the folder is not there."""
    if not self.folder.is_dir():
      raise FileNotFoundError(
        f'model.init_from={self.value!r}: there is no folder {self.folder}; '
        f'must be {HF}FOLDER, the folder of a run that is over, or its '
        f'{PARAMETERS}'
      )

  def section(self) -> dict[str, object]:
    """Returns the keys of the section `model` that belong to the weights.

    Empty for parameters without a run's config.json.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: config.json is missing or malformed, or of a model that our
        decoder is not.
    """
    self.check_folder()
    path = (self.folder if self.is_hf else self.folder.parent) / CONFIG
    if not path.is_file():
      if self.is_hf:
        raise self.problem(f'there is no {path}')
      return {}
    try:
      settings = json.loads(path.read_text())
      if self.is_hf:
        return hf_format.section_of(settings)
      recorded = settings['model']
      if recorded.get('lora_rank'):
        raise ValueError(
          'its parameters are adapters alone; diloco export makes a model of '
          f'them, that {HF}FOLDER names'
        )
      unknown = recorded.keys() - defaults(ModelConfig).keys()
      unknown |= {'init_from'}
      return {k: x for k, x in recorded.items() if k not in unknown}
    except (TypeError, AttributeError, LookupError):
      raise self.problem(f'{path} is malformed') from None
    except ValueError as error:
      raise self.problem(f'{path}: {error}') from None

  def keep_files(self, folder: pathlib.Path) -> None:
    """Copies the files of an export into a run's folder, unless it is there."""
    if folder.exists() or not self.files.is_dir():
      return
    folder.mkdir(parents=True)
    for name in FILES:
      if (self.files / name).is_file():
        shutil.copyfile(self.files / name, folder / name)


def kept_files(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns name -> content of what `Pretrained.keep_files` copied."""
  return {
    name: (folder / name).read_bytes()
    for name in FILES
    if (folder / name).is_file()
  }


def of_model(model: ModelConfig) -> Pretrained | None:
  """Returns what a section `model` begins with; None: it is drawn."""
  return Pretrained(model.init_from) if model.init_from else None


def check_section(model: ModelConfig) -> None:
  """Refuses weights of a decoder that computes something else.

  What a longer context needs may differ: `hf_format.CHANGEABLE`.

  Raises:
    FileNotFoundError: there is no such folder.
    ValueError: names the first key that differs.
  """
  pretrained = of_model(model)
  if pretrained is None:
    return
  section, sizes = pretrained.section(), sizes_of(model)
  if (kind := section.get('kind', model.kind)) != model.kind:
    raise ValueError(
      f'model.kind={model.kind!r}: {model.init_from} has kind {kind!r}'
    )
  if sizes is None or not section:
    return
  differing = hf_format.differing(sizes, section)
  if sizes.experts is not None:
    for key in ('experts', 'top_k'):
      if section.get(key, getattr(model, key)) != getattr(model, key):
        differing.append(key)
  # What costs or schedules a step is not of the weights.
  free = {*hf_format.CHANGEABLE, 'dtype', 'remat', 'attention', 'z_loss'}
  free |= {'lora_rank', 'lora_alpha'}
  for key in differing:
    if key not in free:
      raise ValueError(
        f'model.{key}={getattr(model, key)!r}: {model.init_from} has '
        f'{section.get(key)!r}; --from={model.init_from} sets these keys'
      )


def keys_of(init_from: str) -> dict[str, object]:
  """Returns the keys of a run that begins with these weights, such as
  'model.layers', with their values.

  Raises:
    FileNotFoundError: there is no such folder.
    ValueError: it can't be used.
  """
  source = Pretrained(init_from)
  keys = {f'model.{key}': value for key, value in source.section().items()}
  keys['model.init_from'] = init_from
  if (source.files / TOKENIZER).is_file():
    keys['data.tokenizer'] = f'hf:{source.files}'
  elif (source.files / MODEL).is_file():
    keys['data.tokenizer'] = f'sentencepiece:{source.files / MODEL}'
  return keys
