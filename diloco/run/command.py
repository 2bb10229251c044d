# SPDX-License-Identifier: Apache-2.0
"""Runs the commands that take a training configuration."""

import os
import sys
from collections.abc import Callable, Sequence

from absl import flags, logging

from diloco.config import flags as config_flags
from diloco.config.run_config import RunConfig
from diloco.metrics.workdir import check_folder
from diloco.monitoring import monitor_flags
from diloco.run import allocator, logs, threads


def run_command(
  main: Callable[[RunConfig], int | None],
  required: Sequence[str] = ('workdir',),
  role: str = '',
  access: bool = False,
  of_run: bool = False,
) -> None:
  """Parses sys.argv and exits with what `main` returns.

  A ConfigError ends in a message and exit code 78.

  Args:
    required: flags that must be given, besides --config.
    role: names the process in its log; without one there are no --log_json
      and no --metrics_bind.
    access: whether it takes the flags by which processes know each other.
    of_run: whether --config may be left out, for that of the run in --workdir.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  config_flags.define_flags()
  flags.mark_flags_as_required(required)
  if access:
    config_flags.define_access_flags()
    config_flags.define_proxy_flag()
  if role:
    config_flags.define_log_flags()
    monitor_flags.define()
    if config_flags.asks_for_json(sys.argv):
      logs.write_json(role)

  def configured(_) -> int | None:
    config = config_flags.load()
    logs.keep_ours(config.name, **config_flags.who())
    if role:
      allocator.keep_memory()
      threads.Pulse(_say_stood)
    if access:
      with config_flags.refusing():
        check_folder(config.checkpoint.folder)
    return main(config)

  run = config_flags.run_of_workdir if of_run else config_flags.run
  run(configured)


def _say_stood(stood_s: float) -> None:
  logging.warning(
    'no thread of this process ran for %.1f s: it was suspended, or a library '
    'held the interpreter (such as while it was imported from a slow disk)',
    stood_s,
  )
