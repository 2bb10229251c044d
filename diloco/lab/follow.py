# SPDX-License-Identifier: Apache-2.0
"""Replays a real run in the lab and compares: python -m diloco.lab.follow …

  python -m diloco.lab.follow --workdir=DIR              # from its tapes
  python -m diloco.lab.follow --workdir=DIR --notapes    # by itself

The first command drives the lab's processes by the run's tapes. The second
makes a run of the same configuration by the lab's own machines and clock: with
τ = 0 and K = M only the configuration decides, as long as no process dies.

Exit code 0: the same bytes. 1: something differs; says what. 78: the run can't
be replayed; says why.
"""

import os
import pathlib

from absl import flags

from diloco import flags as config_flags
from diloco.config import RunConfig
from diloco.config_values import ConfigError
from diloco.lab.following import LabFollowing
from diloco.lab.training import train
from diloco.metrics.files import Malformed
from diloco.metrics.workdir import Workdir
from diloco.runtime import logs, replay_session
from diloco.runtime.device import Device
from diloco.runtime.replay_plan import NotReplayable

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the real run.')
_TAPES = flags.DEFINE_bool('tapes', True, 'Follow its tapes.')


def main(_) -> int:
  """Replays the run, compares the result and prints the outcome."""
  logs.keep_ours()
  workdir = Workdir(pathlib.Path(_WORKDIR.value))
  try:
    run = replay_session.open_run(workdir)
    if not _TAPES.value:
      return _by_itself(run)
    contents = LabFollowing(run.blueprint, Device(run.blueprint))
    return replay_session.make_again(run, contents)
  except ConfigError as error:
    config_flags.exit_config(error)
  except (NotReplayable, Malformed, ValueError, FileNotFoundError) as error:
    config_flags.exit_config(ConfigError([str(error)]))


def _by_itself(run: replay_session.Recorded) -> int:
  _check_decided(run.blueprint.config)
  trained = train(run.blueprint)
  print(f'{trained.rounds} rounds, {trained.steps} inner steps in the lab')
  return replay_session.compare_parameters(trained.parameters, run.workdir)


def _check_decided(config: RunConfig):
  """Rejects runs whose merges depend on clocks."""
  protocol = config.protocol
  if protocol.overlap_steps or protocol.quorum != protocol.learners:
    raise ConfigError(
      [
        f'--notapes: protocol.overlap_steps={protocol.overlap_steps}, '
        f'quorum={protocol.quorum}, learners={protocol.learners}: the run '
        'depends on its clocks unless overlap_steps=0 and quorum=learners; '
        'follow its tapes'
      ]
    )


if __name__ == '__main__':
  flags.mark_flag_as_required('workdir')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  config_flags.run_without_config(main)
