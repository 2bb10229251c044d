# SPDX-License-Identifier: Apache-2.0
"""A learner's process: python -m diloco.learner --config=… --learner=0 …"""

import os
import pathlib
import signal
import sys

import jax
from absl import flags, logging

from diloco import config as configs
from diloco import flags as config_flags
from diloco.checkpoint.learner_records import LearnerRecords
from diloco.checkpoint.volumes import BrokenRecord
from diloco.config_values import ConfigError
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import JsonlWriter, MultiWriter, TensorBoardWriter
from diloco.runtime import beginning as beginnings
from diloco.runtime import logs
from diloco.runtime.blueprint import make_blueprint
from diloco.runtime.device import Device
from diloco.runtime.exchange import Exchange
from diloco.runtime.exposure import open_access
from diloco.runtime.link import RunIsOver, SyncerAbsent
from diloco.runtime.machine import describe
from diloco.runtime.outputs import Outputs
from diloco.runtime.tape import LearnerTape
from diloco.runtime.training import Training, stop_on_signals
from diloco.transport import addresses
from diloco.transport.access import Access
from diloco.transport.addresses import BadAddress, HostUnknown
from diloco.transport.control_client import NotAdmitted
from diloco.transport.planes import make_plane

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_LEARNER = flags.DEFINE_integer('learner', None, 'Its id, from 0.')
_SYNCER = flags.DEFINE_string('syncer', None, 'host:port of the syncer.')

_NOTICE_S = flags.DEFINE_float(
  'notice_s', 25.0, 'Seconds from SIGTERM within which it leaves.'
)


def main(_) -> int:
  """Trains to the end of the run: 0; 78 where the syncer refuses for good."""
  config = config_flags.load()
  logs.keep_ours()
  try:
    configs.check_learner(config, _LEARNER.value)
    addresses.split(_SYNCER.value)
    access = open_access(
      config_flags.access_files(),
      config.transport,
      bind=None,
      **config_flags.access_vouched(),
    )
    blueprint = make_blueprint(config)
    configs.check_devices(config, jax.local_device_count())
  except ConfigError as error:
    config_flags.exit_config(error)
  except BadAddress as error:
    syncer = f'--syncer={_SYNCER.value}'
    config_flags.exit_config(ConfigError([f'{syncer}: {error}']))
  except (ValueError, FileNotFoundError) as error:
    config_flags.exit_config(ConfigError([str(error)]))
  try:
    left = _train(blueprint, Workdir(pathlib.Path(_WORKDIR.value)), access)
  except BrokenRecord as error:
    config_flags.exit_config(ConfigError([str(error)]))
  except RunIsOver as over:
    logging.info('left: %s', over)
    return 0
  except (HostUnknown, SyncerAbsent) as error:
    print(f'error: --syncer={_SYNCER.value}: {error}', file=sys.stderr)
    return 1
  except NotAdmitted as error:
    print(f'error: --token_file: {error}', file=sys.stderr)
    return config_flags.EXIT_CONFIG
  if left.refused:
    print(f'error: the syncer refused: {left.reason}', file=sys.stderr)
    return config_flags.EXIT_CONFIG
  logging.info('left: %s', left.reason)
  if left.done:
    return 0
  # Stopped by a signal; or of no use, where another process would be.
  return 128 + signal.SIGTERM if left.stopped else 1


def _train(blueprint, workdir: Workdir, access: Access):
  config, learner = blueprint.config, _LEARNER.value
  name = learner_name(learner)
  transport = config.transport
  plane = make_plane(transport.data_plane, transport.host, access)
  device = Device(blueprint)
  records = LearnerRecords(
    workdir.checkpoints(name),
    learner,
    blueprint.fingerprints,
    config.checkpoint.keep_latest,
    config.checkpoint.keep_best,
    say=logging.warning,
  )
  beginning = beginnings.begin(blueprint, device, records)
  exchange = Exchange(
    blueprint,
    learner,
    _SYNCER.value,
    device,
    beginning.host,
    plane,
    start=beginning.start,
    is_over=workdir.summary.exists,
    access=access,
  )
  writer = MultiWriter(
    [
      JsonlWriter(workdir.metrics(name)),
      TensorBoardWriter(workdir.tensorboard(name)),
    ]
  )
  tape = LearnerTape(
    workdir.learner_tape(learner),
    exchange.process,
    describe(config.mesh, os.environ),
  )
  training = Training(
    blueprint,
    learner,
    device,
    beginning,
    exchange,
    Outputs(records, writer, tape),
    _NOTICE_S.value,
  )
  stop_on_signals(training)
  try:
    return training.run()
  finally:
    exchange.close()
    writer.close()
    tape.close()
    plane.close()


if __name__ == '__main__':
  config_flags.define_flags()
  config_flags.define_access_flags()
  flags.mark_flags_as_required(['workdir', 'learner', 'syncer'])
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  config_flags.run(main)
