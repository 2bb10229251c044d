# SPDX-License-Identifier: Apache-2.0
"""The process of a learner: python -m diloco.learner --config=… --learner=0
…
"""

from absl import flags

from diloco.config import flags as config_flags
from diloco.config import run_config
from diloco.run.command import run_command

flags.DEFINE_string('workdir', None, 'Folder of the run.')
_LEARNER = flags.DEFINE_integer('learner', None, 'Its id, from 0.')
flags.DEFINE_string('syncer', None, 'host:port of the syncer.')

flags.DEFINE_integer(
  'hosts', 1, 'Processes of this learner, each with its own devices.'
)
flags.DEFINE_integer('host', 0, 'Number of this host, from 0.')
flags.DEFINE_string(
  'coordinator', '', 'host:port of host 0, for jax.distributed.'
)
flags.DEFINE_list(
  'live_slices', None, 'Of mesh.slices those that take part, such as 0,2.'
)
flags.DEFINE_string(
  'memory', None, 'Folder in memory for the boundaries of several slices.'
)
flags.DEFINE_string(
  'coordination', '', "host:port of JAX's service, if host 0 does not serve."
)
flags.DEFINE_float(
  'notice_s', 25.0, 'Seconds from SIGTERM within which it leaves.'
)


def main(config: run_config.RunConfig) -> int:
  """Trains to the end of the run.

  Returns:
    0; 69 where it was cut off from the syncer when all steps were made; 78
    where the syncer refuses it for good; 143 where it was stopped; 75 where
    another slice is lost, or is to take part again, and the boundary is in
    memory.
  """
  with config_flags.refusing():
    run_config.check_learner(config, _LEARNER.value)
  # Not at the top: --help, and a flag or key that is refused, need no jax.
  from diloco.learner.hosts import host_main

  return host_main.run(config, flags.FLAGS)


if __name__ == '__main__':
  run_command(
    main, required=('workdir', 'learner', 'syncer'), role='learner', access=True
  )
