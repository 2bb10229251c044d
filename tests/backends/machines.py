# SPDX-License-Identifier: Apache-2.0
"""A machine of each back end, and what a launch gives its processes there.

Scripts are executed here with stand-ins for what such a machine has; manifests
are read as Kubernetes reads them.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import ClassVar

import kubernetes_validate
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import (
  JobsetV1alpha2JobSet,
)

from launch.backends import queued_resources
from launch.backends.gke import Gke
from launch.backends.slurm import Slurm
from launch.program import LEARNER
from tests.waiting import until

HERE = pathlib.Path(__file__).parent
KUBERNETES = '1.31'
DEADLINE_S = 240.0  # On a machine that others work on too.
ADDRESS = '10.0.0.7'  # Of every machine.


class Machine:
  """A machine of a back end.

  Attributes:
    alone: options of a launch whose learners have one host.
    several: of one whose learners have `hosts`, the last of which this is.
  """

  alone: ClassVar[dict] = {}
  several: ClassVar[dict] = {}
  hosts: int
  syncer = '10.0.0.1:7777'
  rendezvous = '10.0.0.2:8500'  # Of learner 0.
  coordinator: str

  def __init__(self, folder: pathlib.Path):
    self.folder = folder

  def programs(self, **texts: str) -> None:
    """Puts executable files into the folder, which is the first of PATH."""
    for name, text in texts.items():
      (self.folder / name).write_text(text)
      (self.folder / name).chmod(0o755)

  def environment(self, **more: str) -> dict[str, str]:
    path = f'{self.folder}:{os.environ["PATH"]}'
    return {**os.environ, 'PATH': path, 'FAKES': str(self.folder), **more}

  def processes(self, whole, role) -> list[list[str]]:
    """Returns the words behind `python` of what is started for a role."""
    raise NotImplementedError

  def is_restarted(self, whole, code: int, restarts: int = 0) -> bool:
    """Returns True if a learner that exits with `code` is started again."""
    raise NotImplementedError


# GKE.


def check_schema(manifest: dict) -> None:
  """Checks against the schema of its kind; an unknown field is an error."""
  if manifest['kind'] != 'JobSet':
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    return
  read = JobsetV1alpha2JobSet.from_dict(manifest)
  assert read.to_dict() == manifest, 'a field that JobSet does not know'
  # The models check names and types of fields; the schema of a Job knows
  # also which values they may have.
  for replicated in manifest['spec']['replicatedJobs']:
    job = {
      'apiVersion': 'batch/v1',
      'kind': 'Job',
      'metadata': {'name': replicated['name']},
      **replicated['template'],
    }
    kubernetes_validate.validate(job, KUBERNETES, strict=True)


def objects(whole, **options) -> dict[str, dict]:
  """Kind/name -> object; all are checked against their schemas."""
  found = Gke(**options).manifests(whole)
  for each in found:
    check_schema(each)
  return {f'{each["kind"]}/{each["metadata"]["name"]}': each for each in found}


def job_of(manifest: dict) -> dict:
  return manifest['spec']['replicatedJobs'][0]['template']['spec']


def pod_of(manifest: dict) -> dict:
  return job_of(manifest)['template']['spec']


class GkeMachine(Machine):
  alone: ClassVar = {'accelerator': 'v5litepod-8'}
  several: ClassVar = {'accelerator': 'v5litepod-16'}
  hosts = 4
  syncer = 'first-syncer:7777'
  # JOBSET-REPLICATEDJOB-JOB-POD.JOBSET, as JobSet names its pods.
  coordinator = 'first-learner-1-slice-0-0.first-learner-1:8476'
  rendezvous = (
    'first-learner-0-rendezvous-slice-0-0.first-learner-0-rendezvous:8500'
  )

  def processes(self, whole, role):
    pod = pod_of(Gke().job_set(whole, role))
    fields = {'status.podIP': ADDRESS}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    fields[index] = str(self.hosts - 1)

    def read(container, word):
      known = {
        each['name']: fields[each['valueFrom']['fieldRef']['fieldPath']]
        for each in container['env']
        if 'valueFrom' in each
      }
      word = re.sub(
        r'(\$?)\$\((\w+)\)',
        lambda m: m[0][1:] if m[1] else known.get(m[2], m[0]),
        word,
      )
      return word.replace('$$(', '$(')

    found = []
    for each in (*pod['containers'], *pod.get('initContainers', ())):
      python, *words = each['command']
      if python == whole.python:
        words += each['args']
        found.append([read(each, word) for word in words])
    return found

  def is_restarted(self, whole, code, restarts=0):
    manifest = Gke().job_set(whole, whole.learners[1])
    (rule,) = job_of(manifest)['podFailurePolicy']['rules']
    assert rule['action'] == 'FailJob'
    assert rule['onExitCodes']['containerName'] == 'learner'
    is_left = restarts < manifest['spec']['failurePolicy']['maxRestarts']
    return is_left and code not in (0, *rule['onExitCodes']['values'])


# TPU VMs.

# Answers of the metadata server and the Secret Manager, and a log of requests.
CURL = """#!/bin/bash
echo "$*" >>"$FAKES/asked"
case "$*" in
  *service-accounts*) echo '{"access_token":"t0k.en","expires_in":3599}' ;;
  *network-interfaces*) echo 10.0.0.7 ;;
  *agent-worker-number*) [[ -e $FAKES/named ]] && echo 3; touch $FAKES/named ;;
  *worker-network-endpoints*) echo 'a:8470:10.0.0.5,b:8470:10.0.0.6,c:8470:' ;;
  *secretmanager*) printf '{\\n  "payload": {"data": "aHVzaAo="}\\n}\\n' ;;
esac
"""
DOCKER = f"""#!{sys.executable} -IS
import json, os, pathlib, sys
folder = pathlib.Path(os.environ['FAKES'])
with (folder / 'docker').with_suffix('.jsonl').open('a') as file:
  file.write(json.dumps(sys.argv[1:]) + chr(10))
codes = folder / 'codes'
left = codes.read_text().split()
if sys.argv[1] == 'run':
  codes.write_text(' '.join(left[1:]))
  sys.exit(int(left[0]))
"""


class TpuVm(Machine):
  alone: ClassVar = {'accelerator': 'v5litepod-8', 'capacity': 'spot'}
  several: ClassVar = {'accelerator': 'v5litepod-16'}
  hosts = 4
  coordinator = '10.0.0.5:8476'

  def __init__(self, folder):
    super().__init__(folder)
    self.state = folder / 'machine'
    self.programs(
      curl=CURL,
      docker=DOCKER,
      iptables='#!/bin/sh\n',
      sleep='#!/bin/sh\necho "$1" >>"$FAKES/slept"\n',
    )

  def start(self, whole, role, *codes: int, bucket='') -> list[list[str]]:
    """Runs the script of a role; returns the calls of `docker run`.

    The containers end with these codes, one after the other.
    """
    script = queued_resources.startup_script(
      whole, role, 'p', self.syncer, 1, bucket, self.rendezvous
    )
    (self.folder / 'codes').write_text(' '.join(map(str, codes)))
    (self.folder / 'docker.jsonl').write_text('')
    subprocess.run(
      ['bash'],
      input=script,
      env=self.environment(DILOCO_FOLDER=str(self.state)),
      text=True,
      check=True,
      timeout=DEADLINE_S,
    )
    lines = (self.folder / 'docker.jsonl').read_text().splitlines()
    return [call for call in map(json.loads, lines) if call[0] == 'run']

  def processes(self, whole, role):
    started = self.start(whole, role, 0, 0)
    (self.state / 'over').unlink()  # As another machine.
    return [call[call.index(whole.image) + 1 :] for call in started]

  def is_restarted(self, whole, code, restarts=0):
    (self.state / 'over').unlink(missing_ok=True)
    codes = [1] * restarts + [code, 0]
    return len(self.start(whole, whole.learners[1], *codes)) > 1 + restarts


# Slurm.

SCONTROL = """#!/bin/bash
case $1 in
  show) printf "${NODES:-node-3\\nnode-4}\\n" ;;
  requeue) echo "$2" >>"$FAKES/requeues" ;;
esac
"""
SRUN = f'#!/bin/sh\nexec {sys.executable} -IS {HERE}/fake_srun.py "$@"\n'
# Stands for Python on a node: does what file 'does.I' says; else it stays.
PYTHON = f"""#!{sys.executable} -IS
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ['FAKES'])
host = os.environ['SLURM_PROCID']
def leave(number, frame):
  time.sleep(float(host) / 2)  # One is slower than the other.
  (folder / f'left.{{host}}').touch()
  sys.exit(143)
signal.signal(signal.SIGTERM, leave)
with (folder / f'argv.{{host}}').open('a') as file:
  file.write(json.dumps(sys.argv[1:]) + chr(10))
(folder / f'pid.{{host}}').write_text(str(os.getpid()))
does = folder / f'does.{{host}}'
if does.exists():
  sys.exit(int(does.read_text()))
while True:
  time.sleep(0.1)  # `pause` would miss a signal that came just before it.
"""


def hurried(script: str) -> str:
  """Returns a script that looks often for the syncer's address."""
  slow = '  sleep 5\ndone'
  return script.replace(slow, slow.replace('5', '0.1'))


class SlurmNode(Machine):
  several: ClassVar = {'accelerator': 'gpu', 'gpus_per_host': 8, 'hosts': 2}
  hosts = 2
  coordinator = f'node-3:{61440 + 4711 % 4096}'

  def __init__(self, folder):
    super().__init__(folder)
    self.workdir = folder / 'work dir'
    (self.workdir / 'logs').mkdir(parents=True)
    for name in ('syncer', 'learner-0-rendezvous'):
      at = getattr(self, name.rpartition('-')[2])
      (self.workdir / f'logs/{name}.address').write_text(f'{at}\n')
    self.programs(srun=SRUN, scontrol=SCONTROL, python=PYTHON)

  def script(self, whole, role) -> str:
    backend = Slurm()
    if role is whole.syncer:
      return backend.syncer(whole)[1]
    if role.kind != LEARNER:
      return backend.call(whole, role)[1]
    if role.slice is not None:
      return backend.learners(whole, [whole.learners[role.learner]])[1]
    return backend.learners(whole, whole.learners)[1]

  def job(self, whole, role, **variables) -> subprocess.Popen:
    """Starts the job of a role; its log is read from standard error."""
    hosts = role.resources.accelerator.hosts
    index = role.learner if role.slice is None else role.slice
    return subprocess.Popen(
      ['bash', '-c', hurried(self.script(whole, role))],
      env=self.environment(
        DILOCO_HOST=ADDRESS,
        SLURM_JOB_ID='4711',
        SLURM_JOB_NODELIST='node-[3-4]',
        SLURM_NNODES=str(hosts),
        SLURM_PROCID='0',
        SLURM_ARRAY_TASK_ID=str(index),
        **variables,
      ),
    )

  def does(self, code: int, host: int = 0) -> None:
    (self.folder / f'does.{host}').write_text(str(code))

  def requeues(self) -> list[str]:
    path = self.folder / 'requeues'
    return path.read_text().splitlines() if path.exists() else []

  def processes(self, whole, role):
    last = role.resources.accelerator.hosts - 1
    for host in range(last + 1):
      self.does(0, host)
    said = self.folder / f'argv.{last}'
    said.unlink(missing_ok=True)
    job = self.job(whole, role)
    assert job.wait(timeout=DEADLINE_S) == 0
    with_evaluator = role is whole.syncer and whole.evaluator is not None
    until(  # The evaluator is not waited for by the job.
      lambda: len(said.read_text().splitlines()) == 1 + with_evaluator,
      DEADLINE_S,
      'all have started',
    )
    return [json.loads(line) for line in said.read_text().splitlines()]

  def is_restarted(self, whole, code, restarts=0):
    self.does(code)
    (self.folder / 'requeues').unlink(missing_ok=True)
    job = self.job(whole, whole.learners[1], SLURM_RESTART_COUNT=str(restarts))
    ended = job.wait(timeout=DEADLINE_S)
    assert self.requeues() in ([], ['4711'])
    assert ended == (0 if self.requeues() else code)
    return bool(self.requeues())

  def pid(self, host: int) -> int:
    path = self.folder / f'pid.{host}'
    until(
      lambda: path.exists() and path.read_text(),
      DEADLINE_S,
      f'a process on node {host}',
    )
    return int(path.read_text())


MACHINES = {'gke': GkeMachine, 'queued_resources': TpuVm, 'slurm': SlurmNode}
