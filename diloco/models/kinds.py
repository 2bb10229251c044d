# SPDX-License-Identifier: Apache-2.0
"""The kinds of models by name; importing this imports no jax."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from diloco.models.decoder_config import DecoderConfig, ExpertsConfig

if TYPE_CHECKING:
  from diloco.models.api import Model


@dataclasses.dataclass(frozen=True)
class ModelKind:
  """A kind of models.

  Attributes:
    make: takes the section `model` and returns the model.
    sizes: takes that section and returns the decoder's dimensions, from which
      its FLOPs are known and by which it is exported; None: it is no decoder.
    has_experts: True if `experts` and `mesh.expert` have an effect.
    fixed: keys of the section of which it knows one value only.
  """

  make: 'Callable[[Any], Model]'
  sizes: Callable[[Any], DecoderConfig] | None = None
  has_experts: bool = False
  fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)


def sizes_of(section) -> DecoderConfig | None:
  """Returns the dimensions of a section `model`; None if it is no decoder."""
  kind = KINDS.get(section.kind)
  return kind.sizes(section) if kind and kind.sizes else None


def _decoder(section) -> 'Model':
  from diloco.models.decoder import make_decoder

  return make_decoder(sizes_of(section))


def _dense(section) -> DecoderConfig:
  keys = {field.name for field in dataclasses.fields(DecoderConfig)}
  return DecoderConfig(
    **{key: getattr(section, key) for key in keys - {'experts'}}
  )


def _moe(section) -> DecoderConfig:
  experts = ExpertsConfig(
    experts=section.experts,
    top_k=section.top_k,
    aux_weight=section.aux_weight,
    z_weight=section.z_weight,
    bias_rate=section.router_bias_rate,
  )
  return dataclasses.replace(_dense(section), experts=experts)


def _bowl(section) -> 'Model':
  from diloco.models.quadratic import make_bowl

  return make_bowl(section.layers, section.d_model, section.d_ff)


def _given(section) -> 'Model':
  from diloco.models.given import given_model

  return given_model(json.loads(pathlib.Path(section.given, TREE).read_text()))


GIVEN = 'given'  # Parameters alone: a loop that is not ours trains them.
TREE = 'tree.json'  # In the folder `model.given`: their shapes and roles.

KINDS = {
  'decoder': ModelKind(_decoder, _dense),
  'moe': ModelKind(
    _decoder, _moe, has_experts=True, fixed={'activation': 'silu'}
  ),
  'bowl': ModelKind(
    _bowl, fixed={'dtype': 'float32', 'remat': 'none', 'tied': False}
  ),
  GIVEN: ModelKind(_given),
}
