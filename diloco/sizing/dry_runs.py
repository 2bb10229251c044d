# SPDX-License-Identifier: Apache-2.0
"""A dry run: all that a learner compiles, for a slice or here, and no network.

Shared by `diloco.learner --dry_run` and `diloco.plan --config=…`.
"""

import os
import sys
from collections.abc import Sequence

from absl import flags

from diloco.config import flags as config_flags
from diloco.config import hardware, run_config
from diloco.config.sections import ConfigError
from diloco.metrics.run_progress import ProgressLine

DRY_RUN = 'dry_run'


def define_flags(needed_else: Sequence[str] = ()) -> None:
  """Defines the flags of a dry run, and those needed without one."""
  text = 'Compiles, says what it takes, and ends: no network.'
  flags.DEFINE_bool(DRY_RUN, False, text)
  config_flags.define()
  for name in needed_else:
    flags.register_multi_flags_validator(
      [DRY_RUN, name],
      lambda given, name=name: given[DRY_RUN] or given[name] is not None,
      message=f'Flag --{name} must have a value other than None.',
    )


def is_asked() -> bool:
  """Returns True if a dry run is requested."""
  asked = flags.FLAGS[DRY_RUN].value
  if not asked:
    for name in config_flags.NAMES:
      if flags.FLAGS[name].present:
        problem = f'--{name}: is of a dry run, with --{DRY_RUN}'
        config_flags.exit_config(ConfigError([problem]))
  return asked


def run(config: run_config.RunConfig) -> int:
  """Prints what a learner takes.

  Args:
    config: of the run; its text is not read.

  Returns:
    The exit code: 1 where a learner does not fit, 78 where it makes no sense.
  """
  # Not at the top: these import jax, and most learners make no dry run.
  from diloco.sizing import estimate

  topology = flags.FLAGS[config_flags.TOPOLOGY].value
  compiler = flags.FLAGS[config_flags.COMPILER].value
  try:
    with ProgressLine() as line:
      # The compiler does not say how far it is.
      place = topology or 'the devices that are here'
      line.say(f'compiles a learner for {place}: minutes for a large one')
      found = _estimate(config, topology, compiler)
  except ConfigError as error:
    config_flags.exit_config(error)
  except estimate.NoCompiler as error:
    config_flags.exit_config(ConfigError([f'--compiler={compiler}: {error}']))
  except estimate.DoesNotFit as error:
    print(
      f'error: it does not fit: {error}; more chips, a larger '
      "inner.accumulate or model.remat='full' take less of each",
      file=sys.stderr,
    )
    return 1
  for line in estimate.lines(found):
    print(line)
  return 0 if found.fits else 1


def _estimate(
  config: run_config.RunConfig, topology: str | None, compiler: str
):
  import jax

  from diloco.run.spec import make_run_spec
  from diloco.sizing import estimate

  slice_ = hardware.topology(topology) if topology else None
  run_spec = make_run_spec(config, reads_text=False)
  if slice_ is not None:
    return estimate.on_slice(run_spec, slice_, compiler)
  hardware.check(os.environ)
  hardware.check_backend(os.environ, jax.default_backend())
  run_config.check_devices(config, jax.local_device_count())
  return estimate.on_devices(run_spec)
