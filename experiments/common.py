# SPDX-License-Identifier: Apache-2.0
"""The bases of configurations, and the arguments that they take.

Keys, defaults, types and rules stand in `diloco/config/sections.py`, those of
simulations in `diloco/config/simulation.py`.
"""

import functools
from collections.abc import Callable

import ml_collections

from diloco.config import run_config
from diloco.config import simulation as simulations


def base() -> ml_collections.ConfigDict:
  """A valid run of two learners; experiments change what they are about."""
  return ml_collections.ConfigDict(run_config.defaults())


def simulation(kind: str) -> ml_collections.ConfigDict:
  """A valid simulation; experiments change what they are about.

  Args:
    kind: of the study, such as 'goodput'.
  """
  return ml_collections.ConfigDict(simulations.defaults(kind))


def experiment(name: str, **defaults) -> Callable:
  """Makes a `get_config(arg)` of a function that changes the base.

  The function takes the base and the arguments behind the colon of --config,
  among them `quicktest`, which shrinks what it has made.

  Args:
    name: of the run.
    **defaults: of further arguments, as `parse_arg` takes them.
  """

  def decorate(change: Callable) -> Callable:
    @functools.wraps(change)
    def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
      args = parse_arg(arg, quicktest=False, **defaults)
      config = base()
      config.name = name
      change(config, args)
      return quicktest(config) if args.quicktest else config

    return get_config

  return decorate


def quicktest(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Shrinks `config`, in place, to about 20 CPU seconds; keeps its character.

  Codecs, merge rules, faults and admission stay as they are.
  """
  config.name += '-quicktest'
  config.model.update(
    layers=2, d_model=32, heads=2, kv_heads=1, head_dim=16, d_ff=64
  )
  config.data.update(
    source='grammar',
    path='',
    mix=(),
    heldout_path='',
    tokenizer='bytes',
    end_token='',
    seq_len=32,
    batch=4,
    grammar_bytes=1 << 16,
  )
  config.inner.update(warmup_steps=4, accumulate=1)
  protocol = config.protocol
  protocol.update(
    learners=min(protocol.learners, 2),
    quorum=min(protocol.quorum, 2),
    fragments=min(protocol.fragments, 2),
    sync_every_steps=4,
    overlap_steps=min(protocol.overlap_steps, 2),
    total_steps=40,
  )
  config.mesh.update(fsdp=1, expert=1, context=1, tensor=1, slices=1)
  config.checkpoint.update(syncer_every_rounds=8, learner_every_steps=10)
  config.run.update(log_every_steps=1, eval_batches=2, eval_batch=4)
  config.lab.final_eval_batches = 2
  if config.run.eval_every_rounds:
    config.run.eval_every_rounds = 8
  return config


def parse_arg(arg: str | None, **defaults) -> ml_collections.ConfigDict:
  """Reads what stands behind the colon of --config=experiments/x.py:ARG.

  Args:
    arg: such as 'quicktest,learners=4': a name alone means True.
    **defaults: the names allowed, with their defaults; the type of a default
      (bool, int, float or str) is the type of its value.

  Returns:
    The names with their values, locked.

  Raises:
    ValueError: a name is unknown or a value is not of its default's type.
  """
  values = dict(defaults)
  for item in filter(None, (arg or '').split(',')):
    name, equals, text = item.partition('=')
    if name not in defaults:
      raise ValueError(
        f'unknown argument {name!r} of the config, it takes '
        f'{", ".join(sorted(defaults)) or "none"}'
      )
    kind, text = type(defaults[name]), text if equals else 'true'
    truths = {'true': True, 'false': False}
    try:
      values[name] = truths[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
      raise ValueError(
        f'argument {name}={text!r} of the config must be of type '
        f'{kind.__name__}'
      ) from None
  return ml_collections.ConfigDict(values).lock()
