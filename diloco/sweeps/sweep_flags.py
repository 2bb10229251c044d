# SPDX-License-Identifier: Apache-2.0
"""The flags --sweep, --seeds and --only, and the variants that they ask for."""

import runpy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import flags as absl_flags

from diloco.config import flags, run_config
from diloco.config.sections import ConfigError

if TYPE_CHECKING:
  from diloco.sweeps.sweep import Variant

SWEEP, SEEDS, ONLY = 'sweep', 'seeds', 'only'
OF_FILE = 'file'  # The value of --sweep alone.


def define() -> None:
  """Defines the flags."""
  absl_flags.DEFINE_string(
    SWEEP,
    None,
    'Makes all variants of the file; with KEY=V1,V2,… those of that key.',
  )
  absl_flags.DEFINE_integer(
    SEEDS, 3, 'Runs of each variant, each with its own seed.', lower_bound=1
  )
  absl_flags.DEFINE_string(ONLY, '', 'Variants whose label has this.')


def spelled_out(argv: Sequence[str]) -> list[str]:
  """Returns a command line in which --sweep has a value, as absl wants it."""
  return [f'{w}={OF_FILE}' if w in ('--sweep', '-sweep') else w for w in argv]


def is_asked() -> bool:
  """Returns True for a sweep, False for a single run.

  Raises:
    ConfigError: a flag of sweeps is given for a single run.
  """
  given = absl_flags.FLAGS
  if given.sweep:
    return True
  if vain := [name for name in (SEEDS, ONLY) if given[name].present]:
    raise ConfigError(
      [f'--{name}: is for --sweep, which is not given' for name in vain]
    )
  return False


def variants() -> list['Variant']:
  """Returns the variants that are asked for, in their order.

  Raises:
    ConfigError: there are none, or they make no sense.
  """
  # It imports SciPy, which a single run does without.
  from diloco.sweeps import sweep

  only = absl_flags.FLAGS.only
  with flags.refusing(ValueError):
    found = sweep.variants(_adding(sweep.of_values))
  rows = [variant for variant in found if only in variant.label]
  if not rows:
    labels = ', '.join(variant.label for variant in found) or 'none'
    raise ConfigError(
      f'--{ONLY}={only}: is in no label of the variants: {labels}'
    )
  return rows


def _adding(of_values: Callable) -> Callable:
  """Returns the `sweep(add)` that is asked for."""
  asked, path = absl_flags.FLAGS.sweep, flags.config_file()
  if asked != OF_FILE:
    return of_values(asked, run_config.key_types())
  make = runpy.run_path(path).get('sweep')
  if make is None:
    raise ConfigError(
      f'--config={path}: has no sweep(add); --sweep=KEY=V1,V2 names values '
      'of a key, such as outer.lr=0.3,0.6'
    )
  return make
