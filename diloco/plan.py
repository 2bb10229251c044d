# SPDX-License-Identifier: Apache-2.0
"""Prints what a run would need, and how to set it up: python -m diloco.plan

  python -m diloco.plan 5B --on=4xv5e-256 --gbps=2

Answers at once, on one screen: whether a chip has room, suggested P, H, τ, K
and grace window with the reasons, bytes, bandwidth needed, times, goodput,
memory of hosts, the syncer's machine. For any other hardware:

  python -m diloco.plan --params=12e9 --learners=4 --bandwidth_gbps=2 \\
    --step_s=1.3 [--chips=1200000] [--latency_s=0.05] …

  python -m diloco.plan --config=experiments/recipe.py:scale=12b \\
    --topology=v5p-256 [--compiler=cpu]

compiles that learner for that slice, without a chip: memory of a chip and of a
host, bytes of a round, FLOPs. It takes a minute or two. See `diloco/sizing`.
"""

import sys
import typing
from collections.abc import Iterator, Sequence

from absl import flags

from diloco import callables
from diloco.config import flags as config_flags
from diloco.config import run_config, unlike
from diloco.config.sections import ConfigError
from diloco.data.sources import IN_MEMORY
from diloco.library import questions
from diloco.metrics.run_progress import ProgressLine
from diloco.sizing import planner
from diloco.sizing.planner import Situation

NEEDED = {
  'params': 'Parameters of the model, such as 12e9 or 12B.',
  'learners': 'Number of learners, M, such as 4.',
  'bandwidth_gbps': "Gbit/s of a learner's link, each way, such as 2.",
  'step_s': 'Seconds that an inner step takes, such as 1.3.',
}
OTHERS = {
  'chips': 'Chips of all learners; 0: nothing is said of failures.',
  'mtbi_days': 'Mean time between interruptions of a chip, in days.',
  'pause_s': 'Seconds that a reconfiguration of a learner takes.',
  'repair_s': 'Seconds until a lost slice, or a spare one, is there.',
  'codec': 'Codec in both directions: int1, int2, int4, int8, bf16 or f32.',
  'latency_s': 'Seconds from a learner to the syncer, one way.',
  'hosts': 'Hosts of each slice of a learner, with equal parts of it.',
  'slices': 'Slices of each learner: groups of hosts that fail together.',
}
PARAMS = 'params'
ON = 'on'
STEP_TOKENS = 'step_tokens'
TOPOLOGY = 'topology'
COMPILER = 'compiler'
LINKS = ('bandwidth_gbps', 'latency_s')  # With --config, of the rounds.
FAILURES = ('mtbi_days', 'pause_s', 'repair_s')  # Also with --config.
LINK_GBPS = 10.0  # There, unless it is given.
EXAMPLE = 'experiments/recipe.py:scale=12b'
KINDS = {
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
  str: flags.DEFINE_string,
}

callables.make_callable(__name__)


class _Count(flags.ArgumentParser):
  """A number such as 12e9, 12B or 150M."""

  syntactic_help = planner.A_COUNT

  def parse(self, argument) -> float:
    try:
      return planner.parse_count(argument)
    except ConfigError:
      raise ValueError(f'must be {self.syntactic_help}') from None


def define_flags() -> None:
  """The flags of this main."""
  for name, text in (NEEDED | OTHERS).items():
    default = getattr(Situation, name, None)  # Its fields have the defaults.
    if name == PARAMS:
      flags.DEFINE(_Count(), name, default, text)
    else:
      kind = typing.get_type_hints(Situation)[name]
      KINDS[kind](name, default, text)
  flags.DEFINE_string(
    ON,
    None,
    'Learners and the TPU slice of each, such as 4xv5e-256; of --slices each.',
  )
  flags.DEFINE_alias('gbps', 'bandwidth_gbps')
  flags.DEFINE_integer(
    STEP_TOKENS,
    planner.STEP_TOKENS,
    f'Tokens of a step of a learner, with --{ON}; gives --step_s.',
    lower_bound=1,
  )
  flags.DEFINE_string(
    TOPOLOGY, None, 'A slice to compile for, such as v5p-256.'
  )
  flags.DEFINE_enum(
    COMPILER,
    '',
    ['', 'tpu', 'cpu'],
    'Compiler for a slice; default: what is here.',
  )


def main(argv) -> int:
  """Prints the plan; 78 where a value is missing or makes no sense."""
  if config_flags.CONFIG in flags.FLAGS:
    return _of_config(argv[1:])
  print(questions.plan(**_situation(argv[1:])))
  return 0


def _of_config(rest) -> int:
  """Says what a learner of a configuration takes on a slice.

  Returns:
    The exit code: 1 where a learner does not fit, 78 where it makes no sense.
  """
  problems = [f'{word!r}: this takes flags only' for word in rest]
  problems += [
    f'--{name}: is for a plan without --config'
    for name in (*NEEDED, *OTHERS, ON, STEP_TOKENS)
    if flags.FLAGS[name].present and name not in LINKS + FAILURES
  ]
  if problems:
    raise ConfigError(problems)
  config = flags.FLAGS[config_flags.CONFIG].value
  source = IN_MEMORY.get(config.data.source)
  if source and source.takes_path and not config.data.path:
    config.data.path = 'unread'  # A plan needs no text.
  config = config_flags.load()
  compiler, topology = flags.FLAGS[COMPILER].value, flags.FLAGS[TOPOLOGY].value
  # Not at the top: the other mode needs no jax.
  from diloco.sizing import estimate, rounds

  kinds = unlike.for_each_kind(
    config,
    config.data.shards,  # All that may join, as in a launch.
    lambda setup: (setup.config, estimate.slice_of(setup, topology)),
  )
  gbps, latency_s = (flags.FLAGS[name] for name in LINKS)
  links = gbps.value or LINK_GBPS, latency_s.value
  failures = {name: flags.FLAGS[name].value for name in FAILURES}
  # Is refused before anything is compiled.
  Situation(1, 1, links[0], step_s=1.0, latency_s=links[1], **failures)
  chips_max, fit = max(slice_.chips for *_, (_, slice_) in kinds), True
  for i, (ids, who, (own, slice_)) in enumerate(kinds):
    one = run_config.with_slices(own, 1)
    with ProgressLine() as line:
      # The compiler does not say how far it is.
      line.say(f'compiles a learner for {slice_.name}: minutes for a large one')
      try:
        needs = estimate.of_config(one, slice_, compiler, chips_max)
      except estimate.NoCompiler as error:
        raise ConfigError([f'--compiler={compiler}: {error}']) from None
      except estimate.DoesNotFit as error:
        whose = f'{who}: ' if kinds[1:] else ''
        line.stay(
          f'error: {whose}it does not fit: {error}; more chips, a larger '
          "inner.accumulate or model.remat='full' take less of each"
        )
        fit = False
        continue
    if kinds[1:]:
      print(f'\n{who}' if i else who)
    if own.mesh.slices > 1:
      print(
        f'a learner of {own.mesh.slices} slices; of one of them, by itself:'
      )
    for line in estimate.lines(needs, with_syncer=not i):
      print(line)
    kind = ids, own, slice_
    for line in rounds.failure_lines(config, kind, *links, **failures):
      print(line)
    fit = fit and needs.fits
  if kinds[1:] or gbps.present or latency_s.present:
    print()
    of_all = [(ids, *kind) for ids, _, kind in kinds]
    for line in rounds.lines(config, of_all, *links):
      print(line)
  return 0 if fit else 1


def _situation(rest) -> dict:
  """Returns the arguments of `questions.plan` that the flags stand for.

  Raises:
    ConfigError: names each wrong value, and what would be right.
  """
  given = flags.FLAGS
  values = {name: given[name].value for name in NEEDED | OTHERS}
  problems = [*_given_in_words(rest, values)]
  problems += [
    f'--{name}: is for a plan with --config'
    for name in (TOPOLOGY, COMPILER)
    if given[name].present
  ]
  said_by_on: tuple[str, ...] = ()
  if given[ON].value is not None:
    said_by_on = planner.SAID_BY_ON
    problems += [
      f'--{name}: --{ON}={given[ON].value} says it'
      for name in said_by_on
      if given[name].present
    ]
    if values['step_s'] is None:
      said_by_on = (*said_by_on, 'step_s')
    planner.parse_slices(given[ON].value)  # Is said first, if it is wrong.
  elif given[STEP_TOKENS].present:
    problems.append(f'--{STEP_TOKENS}: is for a plan with --{ON}')
  values = {k: x for k, x in values.items() if k not in said_by_on}
  missing = [name for name in NEEDED if name in values and values[name] is None]
  problems += [f'--{name}: is missing. {NEEDED[name]}' for name in missing]
  if problems:
    raise ConfigError(problems)
  on = given[ON].value or ''
  return values | {ON: on, STEP_TOKENS: given[STEP_TOKENS].value}


def _given_in_words(rest: Sequence[str], values: dict) -> Iterator[str]:
  """Takes the parameters from a word such as 12B; yields what is wrong."""
  for word in rest:
    if (value := values[PARAMS]) is not None:
      yield f'{word!r}: --{PARAMS}={value:g} is given; all else is flags'
      continue
    try:
      values[PARAMS] = _Count().parse(word)
    except ValueError as error:
      yield f'{word!r}: {error}'


def _parse(argv):
  """Parses the command line according to its mode."""
  if config_flags.has_config(argv):
    return config_flags.parse(argv, example=EXAMPLE)
  return config_flags.parse_without_config(argv)


if __name__ == '__main__':
  define_flags()
  if config_flags.has_config(sys.argv) or config_flags.asked_text(sys.argv):
    config_flags.define_flags()  # Once it is defined it must be given.
  config_flags.run(main, _parse)
