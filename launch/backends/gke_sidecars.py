# SPDX-License-Identifier: Apache-2.0
"""Containers beside a role's own in its pod, and the probes of the syncer.

But for one, they are init containers that are always started again: they begin
before the role, end with the pod, and their deaths are none of the role's. It
needs Kubernetes 1.29.
"""

import shlex

from diloco.metrics.workdir import Workdir
from launch.job import JobSpec, Task

RESULTS_FOLDER = '/results'
COPIED_EVERY_S = 60
# A copy has the times of what was read: a file that grows meanwhile is newer.
COPY = 'cp --recursive --preserve=timestamps --update'
# What a run leaves, but for what a process resumes from or locks.
KEPT_BEHIND = {'checkpoints', 'compiled', 'lock', 'requests', 'syncer'}
RESULTS = [name for name in Workdir.CONTENTS if name not in KEPT_BEHIND]
# A model of tens of GB is written, and copied to the bucket, at the end.
COPY_GRACE_S = 900
PROBED_EVERY_S = 10
STARTS_S = 3600  # A checkpoint of a hundred GB is read within.
# The syncer replaces its status each second, but for when it writes its result.
SILENT_S = 1800


def evaluator(whole: JobSpec, arguments: list[str], shared: list) -> dict:
  """It reads the syncer's checkpoints, in the syncer's pod.

  Args:
    shared: its environment.
  """
  task = whole.evaluator
  command = [whole.python, '-m', task.module]
  return {
    **_beside(whole, task.kind, command),
    'args': arguments,
    'env': shared,
  }


def results(whole: JobSpec) -> dict:
  """It copies what a role leaves to the bucket, whole files at a time.

  A bucket takes no appends, so that the workdir itself can not be there.
  """
  folder = f'{RESULTS_FOLDER}/{whole.name}'
  script = f"""\
cd {shlex.quote(whole.workdir)} || exit
copy() {{
  for each in {' '.join(RESULTS)}; do
    [[ ! -e $each ]] || {COPY} "$each"* {folder}/
  done
}}
mkdir -p {folder}
trap 'copy; exit 0' TERM
while :; do
  copy
  sleep {COPIED_EVERY_S} &
  wait $!
done
"""
  return _beside(whole, 'results', ['bash', '-c', script])


def restored(whole: JobSpec, role: Task) -> dict:
  """It brings a learner's files back before the learner goes on with them.

  A new pod begins with an empty volume, and the files in the bucket would be
  overwritten by those of its last life alone.
  """
  script = f"""\
for each in metrics tapes; do
  kept={RESULTS_FOLDER}/{whole.name}/$each/{role.name}.jsonl
  mkdir -p {shlex.quote(whole.workdir)}/$each
  [[ ! -e $kept ]] ||
    cp --preserve=timestamps $kept* {shlex.quote(whole.workdir)}/$each/ || exit
done
"""
  container = _beside(whole, 'restored', ['bash', '-c', script])
  del container['restartPolicy']  # The others begin once it has ended.
  return container


def watch(whole: JobSpec, address: dict, own_address: str, port: int) -> dict:
  """It serves the run's page, from the workdir."""
  folder = shlex.quote(whole.workdir)
  script = (
    f'until [[ -s {folder}/config.json ]]; do sleep 1; done; '
    f'exec {whole.python} -m diloco.watch {folder} --insecure '
    f'--host={own_address} --port={port}'
  )
  return {
    **_beside(whole, 'watch', ['bash', '-c', script]),
    'env': [address],
    'ports': [{'name': 'page', 'containerPort': port, 'protocol': 'TCP'}],
    'livenessProbe': {
      'httpGet': {'path': '/metrics', 'port': 'page'},
      'initialDelaySeconds': 60,
      'periodSeconds': 60,
      'timeoutSeconds': 20,
    },
  }


def scraped(port: int) -> dict[str, str]:
  """Returns annotations by which Prometheus finds a pod."""
  return {
    'prometheus.io/scrape': 'true',
    'prometheus.io/port': str(port),
    'prometheus.io/path': '/metrics',
  }


def syncer_probes(whole: JobSpec) -> dict[str, dict]:
  """The syncer is ready once it listens, and alive while it tells its state."""
  listens = {
    'tcpSocket': {'port': 'control'},
    'periodSeconds': PROBED_EVERY_S,
    'timeoutSeconds': 5,
  }
  status = shlex.quote(f'{whole.workdir}/status.json')
  fresh = f'[[ $(find {status} -mmin -{SILENT_S // 60}) ]]'
  return {
    'startupProbe': {**listens, 'failureThreshold': STARTS_S // PROBED_EVERY_S},
    'readinessProbe': listens,
    'livenessProbe': {
      'exec': {'command': ['bash', '-c', fresh]},
      # The last process's status is not its own.
      'initialDelaySeconds': STARTS_S,
      'periodSeconds': 60,
      'timeoutSeconds': 20,
      'failureThreshold': 3,
    },
  }


def _beside(whole: JobSpec, name: str, command: list[str]) -> dict:
  return {
    'name': name,
    'image': whole.image,
    'restartPolicy': 'Always',
    'command': command,
  }
