# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a run's Θ from its tapes and compares: python -m diloco.replay …

  python -m diloco.replay RUN

Exit code 0: every round has the CRC of the run, and the parameters are the
same bytes, where the run has come to its end. 1: something differs; the first
round that does is named. 78: the folder can't be replayed; says why.
"""

import os
import pathlib

from diloco.config import flags as config_flags
from diloco.learner.device import Device
from diloco.metrics.workdir import Workdir
from diloco.replay import replay_session
from diloco.replay.replay_backends import ReplayBackend
from diloco.run import logs


def main(argv) -> int:
  """Replays, compares, says what came of it."""
  logs.keep_ours()
  workdir = Workdir(pathlib.Path(argv[1]))
  with config_flags.refusing(*replay_session.UNREADABLE):
    run = replay_session.open_run(workdir)
    backend = ReplayBackend(run.run_spec, Device(run.run_spec))
    return replay_session.make_again(run, backend)


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  config_flags.run_of_runs(main)
