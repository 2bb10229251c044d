# SPDX-License-Identifier: Apache-2.0
"""TPU VMs: a gcloud that takes slices away, and the scripts of the machines."""

import json
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys

import pytest

from diloco.config.hardware import V5E, V5P
from diloco.config.sections import ConfigError
from diloco.transport.sockets import free_port
from launch.backends import queued_resources
from launch.backends.base import CommandFailed
from launch.backends.queued_resources import RUNTIMES, QueuedResources
from tests.backends.launch_values import (
  a_config,
  a_launch,
  a_sliced_launch,
  check_golden,
)
from tests.backends.machines import TpuVm
from tests.waiting import until

pytestmark = pytest.mark.beside

HERE = pathlib.Path(__file__).parent
CLOUD = {'project': 'p', 'zone': 'z'}
SPOT = {'accelerator': 'v5litepod-8', 'capacity': 'spot'}
EXHAUSTED = 'RESOURCE_EXHAUSTED: no more v5e here'


class World:
  """The fake's state, what was said, and a clock that a script moves.

  A turn of the script is what happens while the loop sleeps.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    self.said: list[str] = []
    self.now_s = 0.0
    self.turns = []
    self._write({'instances': {}, 'slices': {}, 'refusals': [], 'outages': []})

  @property
  def backend(self) -> QueuedResources:
    return QueuedResources(
      **CLOUD, say=self.said.append, sleep=self._sleep, now_s=lambda: self.now_s
    )

  def change(self, change) -> None:
    state = self.state
    change(state)
    self._write(state)

  @property
  def state(self) -> dict:
    return json.loads((self._folder / 'state.json').read_text())

  def attempt(self, learner: int) -> str:
    return self.state['slices'][f'first-learner-{learner}']['labels']['attempt']

  def calls(self, verb: str) -> list[list[str]]:
    lines = (self._folder / 'calls.jsonl').read_text().splitlines()
    called = [json.loads(line) for line in lines]
    return [call for call in called if verb in call]

  def _sleep(self, seconds: float) -> None:
    self.now_s += seconds
    assert self.turns, f'the loop goes on for too long: {self.said}'
    self.change(self.turns.pop(0))

  def _write(self, state: dict) -> None:
    (self._folder / 'state.json').write_text(json.dumps(state))


@pytest.fixture
def world(tmp_path, monkeypatch):
  gcloud = tmp_path / 'gcloud'
  gcloud.write_text(
    f'#!/bin/sh\nexec {sys.executable} -I -S {HERE / "fake_gcloud.py"} "$@"\n'
  )
  gcloud.chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  monkeypatch.setenv('FAKES', str(tmp_path))
  return World(tmp_path)


def _becomes(learner, state):
  def change(whole):
    whole['slices'][f'first-learner-{learner}']['state'] = state

  return change


def _disappears(learner):
  return lambda whole: whole['slices'].pop(f'first-learner-{learner}')


def _all(*changes):
  def change(whole):
    for each in changes:
      each(whole)

  return change


def _nothing(whole):
  pass


def _run_ends(code=0):
  def change(whole):
    whole['instances']['first-syncer']['exit'] = code

  return change


def test_a_run_without_a_fault(world):
  world.turns = [
    _all(_becomes(0, 'ACTIVE'), _becomes(1, 'ACTIVE')),
    _run_ends(),
  ]
  assert world.backend.start(a_launch(**SPOT)) == 0
  slices = world.state['slices']
  assert {each['state'] for each in slices.values()} == {'DELETING'}
  assert len(world.calls('create')) == 3


@pytest.mark.parametrize('gone', ['SUSPENDED', 'FAILED'])
def test_a_slice_that_is_gone_is_asked_for_again(world, gone):
  world.turns = [
    _all(_becomes(0, 'ACTIVE'), _becomes(1, 'ACTIVE')),
    _becomes(1, gone),
    _nothing,  # It is being deleted.
    _disappears(1),
    _becomes(1, 'ACTIVE'),
    _run_ends(),
  ]
  assert world.backend.start(a_launch(**SPOT)) == 0
  assert (world.attempt(0), world.attempt(1)) == ('1', '2')
  script = world.state['slices']['first-learner-1']['script']
  assert '--learner=1 ' in script
  assert 'first-learner-1, attempt 2' in script


def test_it_waits_longer_each_time_that_there_is_none(world):
  world.change(lambda state: state['refusals'].extend([EXHAUSTED] * 3))
  world.turns = [_nothing] * 8 + [_run_ends()]
  assert world.backend.start(a_launch(**SPOT, learners=1)) == 0
  again = [line for line in world.said if 'again in' in line]
  assert again == [
    f'learner-0: again in {wait_s} s' for wait_s in (60, 120, 240)
  ]
  assert 'learner-0: asked for, attempt 1' in world.said


def test_it_does_not_wait_for_what_will_never_be(world):
  world.change(lambda state: state['refusals'].append('PERMISSION_DENIED: no'))
  with pytest.raises(CommandFailed, match='PERMISSION_DENIED: no'):
    world.backend.start(a_launch(**SPOT))


def test_what_passes_does_not_end_the_watch(world):
  def fails(state):
    state['outages'] = ['UNAVAILABLE: 503 Service Unavailable'] * 2

  world.turns = [fails, _nothing, _run_ends()]
  assert world.backend.start(a_launch(**SPOT)) == 0
  assert sum('Service Unavailable' in line for line in world.said) == 2


def test_one_that_somebody_else_has_made_meanwhile(world):
  world.change(lambda state: state['refusals'].append('ALREADY_EXISTS: it'))
  world.turns = [_nothing, _run_ends()]
  assert world.backend.start(a_launch(**SPOT, learners=1)) == 0
  assert len(world.calls('create')) == 2


def test_one_that_never_comes_up_is_not_asked_for_at_once(world):
  world.turns = [
    _becomes(0, 'FAILED'),
    _disappears(0),
    _becomes(0, 'FAILED'),
    _disappears(0),
    _nothing,
    _becomes(0, 'ACTIVE'),
    _run_ends(),
  ]
  assert world.backend.start(a_launch(**SPOT, learners=1)) == 0
  assert world.attempt(0) == '3'


def test_what_somebody_deleted_is_not_missed(world):
  world.turns = [
    _all(_becomes(0, 'ACTIVE'), _becomes(1, 'ACTIVE')),
    _disappears(1),
    _nothing,
    _run_ends(),
  ]
  assert world.backend.start(a_launch(**SPOT)) == 0
  assert list(world.state['slices']) == ['first-learner-0']


def test_a_learner_that_another_has_added_is_brought_back(world):
  whole = a_launch(**SPOT, learners_at_first=1)
  world.turns = [_nothing, _run_ends()]
  assert world.backend.start(whole) == 0
  world.change(_run_ends(None))
  world.backend.add(whole, 1)
  world.turns = [
    _becomes(1, 'SUSPENDED'),
    _disappears(1),
    _nothing,
    _run_ends(),
  ]
  assert world.backend.start(whole) == 0
  assert world.attempt(1) == '2'


def test_the_same_command_again_goes_on(world):
  world.turns = [_nothing, _run_ends(1)]
  assert world.backend.start(a_launch(**SPOT)) == 1
  world.change(_run_ends(None))
  world.turns = [_run_ends()]
  world.backend.start(a_launch(**SPOT))
  assert len(world.calls('create')) == 3


def test_the_end_of_the_syncer_is_the_end(world):
  world.turns = [_run_ends(78)]
  assert world.backend.start(a_launch(**SPOT)) == 78


def test_one_learner_is_added_and_removed(world):
  whole = a_launch(**SPOT, learners=3, learners_at_first=1)
  world.turns = [_run_ends()]
  world.backend.start(whole)
  world.backend.add(whole, 2)
  assert (
    '--syncer=10.0.0.1:7777'
    in (world.state['slices']['first-learner-2']['script'])
  )
  world.backend.remove(whole, 2)
  assert world.state['slices']['first-learner-2']['state'] == 'DELETING'


def test_nothing_is_added_to_a_run_that_is_not_there(world):
  with pytest.raises(ConfigError, match='no such machine'):
    world.backend.add(a_launch(**SPOT), 1)


def test_a_neighbour_with_a_similar_name_is_left_alone():
  names = ('first-learner-0', 'second-first-learner-0', 'first-learner-16')
  listed = json.dumps(
    [{'name': f'p/{name}', 'state': {'state': 'ACTIVE'}} for name in names]
  )
  (found,) = queued_resources.slices(a_launch(**SPOT), listed)
  assert (found.task.learner, found.attempt) == (0, 1)


def test_a_slice_of_a_learner_is_asked_for_again_alone(world):
  def becomes(i, state):
    def change(whole):
      whole['slices'][f'first-learner-0-slice-{i}']['state'] = state

    return change

  def disappears(whole):
    del whole['slices']['first-learner-0-slice-1']
    assert 'first-learner-0-rendezvous' in whole['instances']

  world.turns = [
    _all(becomes(0, 'ACTIVE'), becomes(1, 'ACTIVE')),
    becomes(1, 'SUSPENDED'),
    disappears,
    _nothing,
    _run_ends(),
  ]
  assert world.backend.start(a_sliced_launch(**SPOT)) == 0
  slices = world.state['slices']
  attempts = {name: each['labels']['attempt'] for name, each in slices.items()}
  assert attempts == {
    'first-learner-0-slice-0': '1', 'first-learner-0-slice-1': '2',
  }  # fmt: skip
  script = slices['first-learner-0-slice-1']['script']
  assert '"--rendezvous=10.0.0.1:8500"' in script
  assert {each['state'] for each in slices.values()} == {'DELETING'}
  assert [*world.state['instances']] == ['first-syncer']


def test_what_is_asked_for_a_learner_of_several_slices(request):
  whole = a_sliced_launch(accelerator='v5litepod-16')
  backend, parts = QueuedResources(**CLOUD), []
  (learner,) = whole.learners[:1]
  for role in (*whole.rendezvous_of(learner), whole.slices_of(learner)[1]):
    argv = backend.create_command(whole, role, 'x.sh', 1)
    script = queued_resources.startup_script(
      whole, role, 'p', '10.0.0.1:7777', 1, '', '10.0.0.2:8500'
    )
    # What stands below is the same in all.
    parts += [shlex.join(argv).replace(' --', ' \\\n  --')]
    parts += [script.partition('# SPDX')[0]]
  rewrite = request.config.getoption('--rewrite')
  check_golden('gcloud-slices.txt', '\n'.join(parts), rewrite)


@pytest.mark.parametrize(
  'accelerator, capacity',
  [('v5litepod-8', 'on_demand'), ('v5litepod-16', 'reservation')],
)
def test_what_is_asked_for(accelerator, capacity, request):
  reservation = 'ours' if capacity == 'reservation' else ''
  whole = a_launch(
    accelerator=accelerator, capacity=capacity, reservation=reservation
  )
  backend = QueuedResources(
    **CLOUD, service_account='me@p', subnetwork='net', internal_ips=True
  )
  text = shlex.join(backend.create_command(whole, whole.learners[1], 'x.sh', 3))
  check_golden(
    f'gcloud-{accelerator}-{capacity}.txt',
    text.replace(' --', ' \\\n  --') + '\n',
    request.config.getoption('--rewrite'),
  )


def test_another_slice_is_asked_for_another_kind_of_learner():
  text = '1: accelerator=v5p-8, mesh.fsdp=4, capacity=spot'
  config = a_config(8, unlike_learners=text)
  whole = a_launch(config=config, accelerator='v5litepod-8')
  backend = QueuedResources(**CLOUD)
  asked = [
    {*backend.create_command(whole, role, 'x.sh', 1)}
    for role in whole.learners[:2]
  ]
  for words, kind, chip in zip(asked, ('v5litepod-8', 'v5p-8'), (V5E, V5P)):
    assert f'--accelerator-type={kind}' in words
    assert f'--runtime-version={RUNTIMES[chip]}' in words
  assert ['--spot' in words for words in asked] == [False, True]


def test_each_shard_of_the_syncer_has_a_machine(world):
  world.turns = [_run_ends()]
  world.backend.start(a_launch(**SPOT, shards=2))
  made = [call for call in world.calls('create') if 'instances' in call]
  assert [call[3] for call in made] == ['first-syncer', 'first-shard-1']
  assert '--labels=run=first,role=shard' in made[1]
  script = world.state['instances']['first-shard-1']['script']
  assert '"--leader=10.0.0.1:7777"' in script
  assert 'kind=shard' in script and '--privileged' not in script


# The script of a machine, run here with stand-ins for its programs.


@pytest.fixture
def machine(tmp_path):
  return TpuVm(tmp_path)


def started(machine, *codes, bucket='', **changes):
  whole = a_launch(**{**SPOT, **changes})
  return machine.start(whole, whole.learners[1], *codes, bucket=bucket)


def test_the_script_of_a_host(request):
  whole = a_launch(
    accelerator='v5litepod-16',
    secret='first-{role}',
    secret_files=('tls.crt', 'token'),
    image='us-docker.pkg.dev/p/r/diloco:1',
  )
  role = whole.learners[1]
  script = queued_resources.startup_script(whole, role, 'p', '10.0.0.1:7777', 2)
  rewrite = request.config.getoption('--rewrite')
  check_golden('startup-slice.txt', script, rewrite)


def test_its_end_is_told_and_stays(machine):
  assert len(started(machine, 78)) == 1
  assert (machine.state / 'over').read_text() == '78\n'
  assert '--data 78 ' in (machine.folder / 'asked').read_text()
  assert started(machine, 0) == []  # A machine that starts again.


def test_the_container_finds_secret_and_configuration(machine):
  started(machine, 0, secret='s', secret_files=('token',))
  secret = machine.state / 'secret' / 'token'
  assert secret.read_text() == 'hush\n'
  assert secret.stat().st_mode & 0o077 == 0
  config = machine.state / 'config' / 'quickstart.py'
  assert config.read_text() == 'text of the configuration\n'
  assert 'Bearer t0k.en' in (machine.folder / 'asked').read_text()


def test_the_evaluator_is_a_container_of_its_own(machine):
  whole = a_launch(**SPOT, evaluated=16)
  evaluator, _ = machine.start(whole, whole.syncer, 0, 0)
  assert evaluator[1:5] == [
    '--network=host', '--detach', '--name=evaluator', '--restart=on-failure',
  ]  # fmt: skip


def test_a_host_asks_for_its_number_and_waits_for_the_others(machine):
  """It waits for the metadata server; after a death, until all are dead."""
  started(machine, 134, 0, accelerator='v5litepod-16')
  asked_s, died_s = map(int, (machine.folder / 'slept').read_text().split())
  assert asked_s == queued_resources.AGAIN_S
  assert died_s > queued_resources.DEAD_WITHIN_S


def test_what_a_learner_leaves_comes_to_the_bucket(machine):
  """And what its last slice left comes back before it begins."""
  folder = machine.folder
  curl = (folder / 'curl').read_text()
  listed = '{"items": [\\n {"name": "first/metrics/learner-1.jsonl"}\\n]}'
  (folder / 'curl').write_text(
    curl.replace(
      'case "$*" in',
      'case "$*" in\n'
      f"  *prefix=first%2Fmetrics*) printf '{listed}' ;;\n"
      '  *alt=media) while [[ $1 != --output ]]; do shift; done\n'
      '    echo kept >"$2" ;;',
    )
  )
  workdir = folder / 'machine' / 'workdir'
  docker = (folder / 'docker').read_text()  # The learner writes some files.
  (folder / 'docker').write_text(
    docker.replace(
      "if sys.argv[1] == 'run':\n",
      "if sys.argv[1] == 'run':\n"
      f"  workdir = pathlib.Path('{workdir}')\n"
      "  for name in ('checkpoints/large', 'tapes/learner-1.jsonl'):\n"
      '    (workdir / name).parent.mkdir(exist_ok=True)\n'
      '    (workdir / name).touch()\n',
    )
  )
  started(machine, 0, bucket='ours')
  assert (workdir / 'metrics' / 'learner-1.jsonl').read_text() == 'kept\n'
  asked = (folder / 'asked').read_text()
  assert (
    '/b/ours/o/first%2Fmetrics%2Flearner-1.jsonl?alt=media' in asked
    and 'prefix=first%2Ftapes%2Flearner-1.jsonl' in asked
  )
  assert '--upload-file ./tapes/learner-1.jsonl' in asked
  assert '/b/ours/o?uploadType=media&name=first%2Ftapes%2Flearner-1' in asked
  assert '--upload-file ./metrics' not in asked  # It has not changed.
  assert 'large' not in asked


# The scripts of one slice side by side: they meet again and again.

HOSTS = 4
DEADLINE_S = 240.0  # On a machine that others work on too.
# A second of a script is 1/40 here: 30 s become 0.75 s, and the stand-ins of
# the learner, which are to be dead within 20 s, are within 0.5 s.
SLEEP = f"""#!{sys.executable} -IS
import sys, time
time.sleep(float(sys.argv[1]) / 40)
"""
SLICE_CURL = """#!/bin/bash
case "$*" in
  *agent-worker-number*) echo "$HOST" ;;
  *worker-network-endpoints*) echo 'a:8470:10.0.0.5,b:8470:10.0.0.6' ;;
  *network-interfaces*) echo 10.0.0.7 ;;
esac
"""
SLICE_DOCKER = f"""#!/bin/sh
exec {sys.executable} -IS {HERE}/fake_slice.py "$@"
"""


class Slice:
  """Runs one script for each host, in a process group of its own."""

  def __init__(self, folder):
    self.folder = folder
    for name, text in (
      ('curl', SLICE_CURL),
      ('sleep', SLEEP),
      ('docker', SLICE_DOCKER),
    ):
      (folder / name).write_text(text)
      (folder / name).chmod(0o755)
    (folder / 'port').write_text(str(free_port()))
    whole = a_launch(accelerator='v5litepod-16')
    self.script = queued_resources.startup_script(
      whole, whole.learners[0], 'p', '10.0.0.1:7777', 1
    )
    self.hosts = {}

  def boot(self, host):
    self.hosts[host] = subprocess.Popen(
      ['bash', '-c', self.script],
      env={
        **os.environ,
        'PATH': f'{self.folder}:{os.environ["PATH"]}',
        'FAKES': str(self.folder),
        'DILOCO_FOLDER': str(self.folder / f'host-{host}'),
        'HOST': str(host),
      },
      stdout=subprocess.DEVNULL,
      process_group=0,
    )

  def fall(self, host):
    """The machine is gone, with all that it runs."""
    os.killpg(self.hosts[host].pid, signal.SIGKILL)
    self.hosts.pop(host).wait()

  def kill_learner(self, host):
    os.kill(int((self.folder / f'pid.{host}').read_text()), signal.SIGKILL)

  def met(self, host):
    """Returns how often this host was in a world of all hosts."""
    path = self.folder / f'met.{host}'
    return len(path.read_text().splitlines()) if path.exists() else 0

  def until_met(self, times):
    until(
      lambda: all(self.met(host) >= times for host in range(HOSTS)),
      DEADLINE_S,
      lambda: f'{times} worlds: {list(map(self.met, range(HOSTS)))}',
    )


@pytest.fixture
def machines(tmp_path):
  found = Slice(tmp_path)
  for host in range(HOSTS):
    found.boot(host)
  yield found
  for host in list(found.hosts):
    found.fall(host)


def test_after_any_death_all_meet_again(machines):
  victims = random.Random(0).sample(range(HOSTS), HOSTS)
  for times, victim in enumerate(victims, start=1):
    machines.until_met(times)
    machines.kill_learner(victim)
  machines.until_met(HOSTS + 1)
  assert [machines.met(host) for host in range(HOSTS)] == [HOSTS + 1] * HOSTS


@pytest.mark.parametrize('host', [0, 2])
def test_a_machine_that_is_back_before_the_others_know(machines, host):
  """The machine finds no host that takes it in, until the others have died."""
  machines.until_met(1)
  machines.fall(host)
  machines.boot(host)
  machines.until_met(2)
