# SPDX-License-Identifier: Apache-2.0
"""Makes what the names of a configuration mean: ours, or the user's own code.

Codecs are made by `CodecConfig.make`, which planners without jax ask, too.
"""

import math
from collections.abc import Mapping
from typing import Any

from diloco.config import own_code, sections
from diloco.config.run_config import RunConfig
from diloco.models import api
from diloco.models.kinds import KINDS
from diloco.numerics import blend as blends
from diloco.numerics import inner as inner_step
from diloco.numerics import merge
from diloco.numerics import outer as outer_step
from diloco.numerics.fragments import EMBEDDINGS, TensorSpec
from diloco.numerics.optimizers import INNER, OUTER
from diloco.protocol.config import BLEND, ProtocolConfig


def model(config: RunConfig) -> api.Model:
  """Makes the model of the section `model`.

  Raises:
    ValueError: it is one of the user's own, which can't be found, is no model,
      or has no loss of the run's batches.
  """
  section, data = config.model, config.data
  if section.kind in KINDS:
    return KINDS[section.kind].make(section)

  def check(made):
    if not isinstance(made, api.Model):
      raise ValueError(
        f'gave a {type(made).__name__}, must give a '
        'diloco.models.api.Model, such as plain_model(init, loss)'
      )
    api.check_model(made)
    api.check_loss(made, data.batch, data.seq_len)
    return made

  return own_code.make('model.kind', section.kind, section, check=check)


def inner(
  section: sections.InnerConfig,
  specs: Mapping[str, TensorSpec],
  axes: Mapping[str, tuple[str | None, ...]],
) -> Any:
  """Makes the inner optimizer, a transformation of optax.

  Args:
    specs: the model's tensors.
    axes: the logical name of each of their axes.

  Raises:
    ValueError: it is one of the user's own, which can't be found or fails
      `numerics.inner.check_inner`; or it does not suit the model.
  """
  given = section, specs, axes
  if section.optimizer in INNER:
    return INNER[section.optimizer](*given)
  return own_code.make(
    'inner.optimizer',
    section.optimizer,
    *given,
    check=lambda made: inner_step.check_inner(made, specs),
  )


def outer(config: RunConfig) -> Any:
  """Makes one fragment's outer optimizer; it counts the fragment's rounds.

  Raises:
    ValueError: it is one of the user's own, which can't be found or fails
      `numerics.outer.check_outer`.
  """
  section, anneal = config.outer, None
  if section.anneal_fraction or section.warmup_fraction:
    rounds = config.protocol.total_steps / config.protocol.sync_every_steps
    anneal = outer_step.Anneal(
      begin=(1 - section.anneal_fraction) * rounds
      if section.anneal_fraction
      else math.inf,
      end=rounds,
      final_lr=section.final_lr,
      warmup=section.warmup_fraction * rounds,
    )
  if section.optimizer in OUTER:
    return OUTER[section.optimizer].make(section, anneal)
  return own_code.make(
    'outer.optimizer',
    section.optimizer,
    section,
    anneal,
    check=outer_step.check_outer,
  )


def merge_rules(config: RunConfig) -> tuple[merge.Rule, merge.Rule]:
  """Makes the rules `merge.rule` and `merge.embedding`.

  Raises:
    ValueError: one is of the user's own, and can't be found, fails
      `numerics.merge.check_rule`, or can't merge what the run cuts.
  """
  section, rules = config.merge, []
  cuts_rows = EMBEDDINGS[config.fragments.embedding].cuts_rows
  for key, is_cut in (('rule', False), ('embedding', cuts_rows)):
    name = getattr(section, key)
    if name in merge.RULES:
      rules.append(merge.RULES[name])
      continue

    def check(made, is_cut=is_cut):
      merge.check_rule(made)
      if made.of_whole_tensors and is_cut and config.protocol.fragments > 1:
        raise ValueError(
          'it is of whole tensors, and fragments.embedding='
          f'{config.fragments.embedding!r} cuts the tables by rows; give '
          "fragments.embedding='own', or merge.embedding='mean'"
        )
      return made

    rules.append(own_code.make(f'merge.{key}', name, section, check=check))
  return rules[0], rules[1]


# How far a blend of the user's own is checked: its shapes alone, or what it
# computes, on a device.
SHAPES, ON_DEVICE = blends.check_shapes, blends.check_values


def blend(section: ProtocolConfig, check=SHAPES) -> blends.Blend:
  """Makes the rule by which a learner takes in an update.

  Args:
    check: `SHAPES` or `ON_DEVICE`.

  Raises:
    ValueError: it is one of the user's own, which can't be found or fails the
      check.
  """
  if section.blend in blends.RULES:
    return blends.make_blend(section.blend, section.blend_alpha)
  return blends.by_piece(
    own_code.make(BLEND, section.blend, section, check=check)
  )
