# SPDX-License-Identifier: Apache-2.0
"""Exit codes as all back ends read them, and what becomes of who exited."""

import dataclasses
import signal

EXIT_CONFIG = 78  # The same configuration would fail again.
EXIT_USAGE = 64  # So would the same command line.
EXIT_CUT_OFF = 69  # A learner has made all steps, and found no syncer.
# All others but 0 are tried again.
EXITS_FATAL = (EXIT_USAGE, EXIT_CUT_OFF, EXIT_CONFIG)
EXIT_STOPPED = 143  # 128 + SIGTERM: it left within its notice.

# States of a process.
RUNNING = 'running'
WAITING = 'waiting'  # Dead; will be started again.
FINISHED = 'finished'  # Exited with 0.
DEAD = 'dead'  # Will not be started again.
STOPPED = 'stopped'  # Told to leave; the same command starts it again.


@dataclasses.dataclass(frozen=True)
class ExitDecision:
  """The decision about a process that exited, and its reason."""

  state: str  # FINISHED, WAITING or DEAD.
  stops_run: bool
  reason: str


def after_exit(
  code: int,
  restarts: int,
  restarts_max: int,
  run_is_over: bool,
  optional: bool = False,
) -> ExitDecision:
  """Decides about a process that exited with `code` (−n: by signal n)."""
  how = describe_exit(code)
  if code == 0:
    return ExitDecision(FINISHED, False, how)
  if run_is_over:
    return ExitDecision(DEAD, False, f'{how}; the run is over, no restart')
  if code == EXIT_CONFIG:
    reason = f'{how}: it can not run as configured'
    return ExitDecision(DEAD, not optional, reason)
  if code == EXIT_CUT_OFF:
    return ExitDecision(DEAD, False, f'{how}: its steps are made, no syncer')
  if restarts >= restarts_max:
    reason = f'{how}; restarts used up ({restarts} of {restarts_max})'
    return ExitDecision(DEAD, not optional, reason)
  return ExitDecision(WAITING, False, f'{how}; restart {restarts + 1}')


def describe_exit(code: int) -> str:
  """Describes an exit code: 'exited with code 1', 'died of SIGKILL'."""
  if code >= 0:
    return f'exited with code {code}'
  return f'died of {signal.Signals(-code).name}'


def has_left(code: int) -> bool:
  """Returns True if it ended in good order: at the run's end, or when told
  to.
  """
  return code in (0, EXIT_STOPPED, -signal.SIGTERM)


def severity(code: int) -> int:
  """Returns the severity of an exit code.

  Of the processes of one role, the exit code of highest severity counts.
  """
  if code == EXIT_CONFIG:
    return 3
  if not has_left(code):
    return 2
  return 1 if code else 0
