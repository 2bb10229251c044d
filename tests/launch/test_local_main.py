# SPDX-License-Identifier: Apache-2.0
"""`python -m launch.local`: what it refuses before a process is started."""

import dataclasses
import fcntl
import json
import pathlib
import socket
import subprocess
import sys

import pytest

from diloco.config import lab_section, run_config
from diloco.config.data_section import too_short_text
from diloco.config.sections import ConfigError
from diloco.metrics import files
from diloco.metrics.workdir import Workdir
from diloco.run.spec import check_text, load_text
from experiments import quickstart, tests_tiny
from launch.local import lacks_evaluation, occupy, still_due
from launch.program import on_this_machine, program
from launch.role_processes import free_address

pytestmark = pytest.mark.beside

FLAG = '--config=experiments/tests_tiny.py'
CONFIG = run_config.build(tests_tiny.get_config())


def refused(*argv):
  done = subprocess.run(
    [sys.executable, '-m', 'launch.local', *argv],
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert done.returncode == 78, done.stderr
  assert done.stdout == ''
  return done.stderr


def test_a_mistake_ends_in_one_line(tmp_path):
  run = f'--workdir={tmp_path / "run"}'
  fault = "--config.faults=('kill learner 9 at 0.1',)"
  assert refused(FLAG) == ('error: --workdir: is missing, such as runs/first\n')
  assert refused(FLAG, run, '--config.model.layer=3') == (
    'error: --config.model.layer=3: unknown key model.layer, did you mean '
    'model.layers?\n'
  )
  assert refused(FLAG, run, fault).endswith('learner 9 of 2, ids start at 0\n')
  assert refused(FLAG, run, 'more') == 'error: more: unexpected argument\n'
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'flags',
  [
    ('source=text', 'path=/no/such/text.txt'),
    ('source=parquet', 'path=/no/such/train-*.parquet'),
    ('source=mix', "mix=('1 parquet /no/such/web',)"),
  ],
  ids=['text', 'pattern', 'mix'],
)
def test_missing_data_end_in_one_line(tmp_path, flags):
  """It is said before any process is started."""
  run = f'--workdir={tmp_path / "run"}'
  said = refused(FLAG, run, *(f'--config.data.{each}' for each in flags))
  assert said.startswith(f"error: data.{flags[1].partition('=')[0]}='/no/such/")
  assert said.endswith('there is nothing at this path\n')
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('nbytes', 'needed'), [(5000, 17067), (17066, 17067), (0, 17067)]
)
def test_too_short_a_text_ends_in_one_line(tmp_path, nbytes, needed):
  """It says how many bytes are needed, and starts nothing."""
  text, run = tmp_path / 'text.txt', tmp_path / 'run'
  text.write_bytes(b'a' * nbytes)
  said = refused(
    '--config=experiments/quickstart.py',
    f'--workdir={run}',
    '--config.data.source=text',
    f'--config.data.path={text}',
  )
  assert said.startswith(f"error: data.path='{text}': {nbytes} bytes are")
  assert f'a text needs {needed}' in said
  assert said.count('\n') == 1
  assert not run.exists()


def test_a_text_that_suffices_is_told_by_its_sizes(tmp_path):
  text = tmp_path / 'text.txt'
  given = quickstart.get_config()
  given.data.update(source='text', path=str(text))
  data = run_config.build(given).data
  for nbytes, short in ((17066, 1), (17067, 0), (100_000, 0)):
    text.write_bytes(b'a' * nbytes)
    assert len([*too_short_text(data)]) == short
    config = run_config.build(given)
    try:
      check_text(config, load_text(config))
      assert not short
    except ValueError:
      assert short


@pytest.mark.parametrize(
  ('workdir', 'line'),
  [
    ('/proc/nope', 'error: --workdir=/proc/nope: no run can be kept there'),
    ('gs://bucket/run', 'error: --workdir=gs://bucket/run: must be a folder'),
  ],
)
def test_a_folder_that_can_not_be_ends_in_one_line(workdir, line):
  said = refused(FLAG, f'--workdir={workdir}')
  assert said.startswith(line)
  assert said.count('\n') == 1
  assert not pathlib.Path('gs:').exists()


def test_the_script_that_ties_a_child_to_its_parent_says_how_it_is_called():
  done = subprocess.run(
    [sys.executable, '-m', 'launch.parent_death', '--help'],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 64
  assert 'parent_death.py PID COMMAND' in done.stderr
  assert 'Traceback' not in done.stderr


def test_two_shards_take_the_flag_of_how_all_log():
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'diloco.syncer_shard', FLAG, '--log_json'),
      *('--workdir=nowhere', '--shard=9', '--lead=127.0.0.1:1'),
    ],
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert done.returncode == 78
  [line] = done.stderr.splitlines()
  record = json.loads(line)
  assert record['role'] == 'syncer_shard'
  assert '--shard=9: must be in' in record['message']


def test_launching_imports_no_jax():
  code = (
    'import sys, launch.local, launch.session, diloco.config.run_config\n'
    'print([m for m in ("jax", "flax", "optax", "grain", "grpc", "matplotlib")'
    ' if m in sys.modules])'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout == '[]\n'


def test_the_program_of_a_run():
  given = quickstart.get_config()
  given.run.eval_every_rounds = 32
  parts = program(
    run_config.build(given),
    ['--config=x.py'],
    Workdir(pathlib.Path('w')),
    'localhost:7',
    ['--token_file=t'],
  )
  assert [role.name for role in parts.roles] == [
    'syncer', 'learner-0', 'learner-1', 'learner-2', 'evaluator',
  ]  # fmt: skip
  common = ('--config=x.py', '--workdir=w', '--token_file=t')
  assert parts.roles[0].argv == (
    sys.executable, '-m', 'diloco.syncer', *common, '--bind=localhost:7',
  )  # fmt: skip
  assert parts.roles[2].argv == (
    sys.executable, '-m', 'diloco.learner', *common, '--learner=1',
    '--syncer=localhost:7',
  )  # fmt: skip
  assert parts.evaluate.argv == (
    sys.executable, '-m', 'diloco.evaluate', *common[:2],
  )  # fmt: skip
  assert [role.name for role in parts.roles if role.ends_run] == ['syncer']
  assert [role.name for role in parts.roles if role.optional] == ['evaluator']
  assert ('NPROC', '2') in parts.environment


def test_a_learner_of_two_processes_beside_one_of_one():
  given = quickstart.get_config()
  given.protocol.learners = 2
  given.faults = ()
  given.mesh.fsdp = 4
  config = run_config.build(given)
  _, first, second = program(
    config,
    ['--config=x.py'],
    Workdir(pathlib.Path('w')),
    'localhost:7',
    log_arguments=['--log_json'],
    learners=on_this_machine(config, '2,1', True, ''),
  ).roles
  assert (first.hosts, second.hosts) == (2, 1)
  assert first.command(1, 'here:5') == [
    *first.argv, '--hosts=2', '--host=1', '--coordinator=here:5',
  ]  # fmt: skip
  assert second.command(0, '') == list(second.argv)
  assert '--log_json' in first.argv
  ((name, value),) = second.environment
  assert name == 'XLA_FLAGS'
  assert value.endswith('device_count=4')


def test_an_empty_or_absent_folder_is_taken(tmp_path):
  workdir, lock, goes_on = occupy(tmp_path / 'a' / 'b', False, CONFIG)
  assert not goes_on
  assert workdir.root.is_dir()
  lock.close()
  occupy(tmp_path / 'a' / 'b', False, CONFIG)[1].close()


def test_a_run_is_overwritten_only_when_asked(tmp_path):
  (tmp_path / 'logs').mkdir()
  (tmp_path / 'logs' / 'syncer.log').write_text('x')
  (tmp_path / 'status.json').write_text('{}')
  with pytest.raises(ConfigError, match='--overwrite to remove that run'):
    occupy(tmp_path, False, CONFIG)
  occupy(tmp_path, True, CONFIG)[1].close()
  assert [path.name for path in tmp_path.iterdir()] == ['lock']


@pytest.mark.parametrize('text', ['', '{}', '[1', '{"run": 7}'])
def test_a_broken_status_decides_nothing(tmp_path, text):
  """It is a view of the run, which the syncer soon replaces."""
  (tmp_path / 'status.json').write_text(text)
  assert still_due((), CONFIG, Workdir(tmp_path)) == ()


def _left(tmp_path, config):
  """A folder as a launcher leaves it that was stopped."""
  files.write_json(tmp_path / 'config.json', dataclasses.asdict(config))
  (tmp_path / 'logs').mkdir()


def test_a_run_that_was_stopped_goes_on(tmp_path):
  _left(tmp_path, CONFIG)
  _, lock, goes_on = occupy(tmp_path, False, CONFIG)
  lock.close()
  assert goes_on
  assert (tmp_path / 'logs').is_dir()


def test_what_may_differ_does_not_keep_a_run_from_going_on(tmp_path):
  run = dataclasses.replace(CONFIG.run, restarts_max=99)
  _left(tmp_path, dataclasses.replace(CONFIG, run=run))
  _, lock, goes_on = occupy(tmp_path, False, CONFIG)
  lock.close()
  assert goes_on


def test_another_run_is_named_by_what_differs(tmp_path):
  inner = dataclasses.replace(CONFIG.inner, lr=0.5)
  _left(tmp_path, dataclasses.replace(CONFIG, inner=inner))
  (tmp_path / 'checkpoints').mkdir()
  with pytest.raises(ConfigError, match=r'inner\.lr: \S+ here, 0\.5 there'):
    occupy(tmp_path, False, CONFIG)


def test_a_start_that_failed_claims_no_folder(tmp_path):
  """No step was made: another run may take its place."""
  inner = dataclasses.replace(CONFIG.inner, lr=0.5)
  _left(tmp_path, dataclasses.replace(CONFIG, inner=inner))
  (tmp_path / 'logs' / 'syncer.log').write_text('error: it can not run\n')
  workdir, lock, goes_on = occupy(tmp_path, False, CONFIG)
  lock.close()
  assert not goes_on
  assert [path.name for path in workdir.root.iterdir()] == ['lock']


def test_a_run_that_is_over_does_not_go_on(tmp_path):
  _left(tmp_path, CONFIG)
  (tmp_path / 'summary.json').write_text('{}')
  (tmp_path / 'evaluation.json').write_text('{}')
  with pytest.raises(ConfigError, match='holds a run that is over'):
    occupy(tmp_path, False, CONFIG)


def _of_steps(total_steps):
  protocol = dataclasses.replace(CONFIG.protocol, total_steps=total_steps)
  return dataclasses.replace(CONFIG, protocol=protocol)


def test_a_run_that_is_over_is_extended_never_shortened(tmp_path):
  _left(tmp_path, CONFIG)
  (tmp_path / 'summary.json').write_text('{}')
  _, lock, goes_on = occupy(tmp_path, False, _of_steps(90))
  lock.close()
  assert goes_on
  with pytest.raises(ConfigError, match=r'total_steps: 30 here, 60 there'):
    occupy(tmp_path, False, _of_steps(30))
  (tmp_path / 'evaluation.json').write_text('{}')
  with pytest.raises(ConfigError, match='above 60 extends it; give another'):
    occupy(tmp_path, False, CONFIG)


def test_a_run_that_was_stopped_in_its_evaluation_goes_on_with_that(tmp_path):
  _left(tmp_path, CONFIG)
  workdir = Workdir(tmp_path)
  assert not lacks_evaluation(workdir, CONFIG)
  workdir.summary.write_text('{}')
  _, lock, goes_on = occupy(tmp_path, False, CONFIG)
  lock.close()
  assert goes_on
  assert lacks_evaluation(workdir, CONFIG)
  assert not lacks_evaluation(workdir, _of_steps(90)), 'it is longer now'


@pytest.mark.parametrize('overwrite', [False, True])
def test_a_folder_of_something_else_is_never_touched(tmp_path, overwrite):
  (tmp_path / 'logs').mkdir()
  (tmp_path / 'thesis.tex').write_text('x')
  with pytest.raises(ConfigError, match=r"holds 'thesis\.tex', which is not"):
    occupy(tmp_path, overwrite, CONFIG)
  assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_in_use_is_refused(tmp_path):
  with (tmp_path / 'lock').open('ab') as other:
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match='another launcher is running'):
      occupy(tmp_path, True, CONFIG)


def test_a_file_is_no_folder(tmp_path):
  path = tmp_path / 'x'
  path.write_text('')
  with pytest.raises(ConfigError, match='is a file, give a folder'):
    occupy(path, True, CONFIG)


def test_a_free_port_is_found():
  host, _, port = free_address('127.0.0.1', 0).rpartition(':')
  assert host == '127.0.0.1'
  # An outgoing connection does not take it before the syncer is there.
  sources = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')
  first = int(sources.read_text().split()[0]) if sources.exists() else 0
  assert 0 < int(port) < (first if first > 10_001 else 65_536)


def test_a_port_in_use_is_refused():
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=rf'port={port}: is in use'):
      free_address('127.0.0.1', port)


def test_a_host_that_does_not_resolve_is_refused():
  with pytest.raises(ConfigError, match='can not be resolved'):
    free_address('no-such-host.invalid', 0)


def test_an_address_of_another_machine_is_refused():
  with pytest.raises(ConfigError, match='is no address of this machine'):
    free_address('192.0.2.1', 0)


def test_faults_are_read_and_ordered():
  planned = lab_section.plan(
    ['kill learner 1 at 0.5', 'kill syncer at 0.25'], 2
  )
  assert planned == (
    lab_section.Kill('syncer', 0.25),
    lab_section.Kill('learner-1', 0.5),
  )
  assert not planned[1].is_due(49, 100)
  assert planned[1].is_due(50, 100)
  assert lab_section.plan([], 1) == ()


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('kill learner 2 at 0.5', 'learner 2 of 2, ids start at 0'),
    ('kill learner at 0.5', 'expected kill learner N at FRACTION'),
    ('stop learner 1 at 0.5', 'expected kill learner N at FRACTION'),
    ('kill learner 1 at 1.5', 'the fraction is 1.5'),
    ('kill learner 1 at -1', 'expected kill learner N at FRACTION'),
    ('', 'expected kill learner N at FRACTION'),
  ],
)
def test_a_fault_that_can_not_be_read_is_named(text, message):
  with pytest.raises(ConfigError) as caught:
    lab_section.plan(['kill learner 0 at 0.1', text], 2)
  (problem,) = caught.value.problems
  assert problem.startswith(f'faults[1]={text!r}: ')
  assert message in problem


def test_what_a_full_disk_leaves_behind_keeps_no_run_from_going_on(tmp_path):
  workdir, lock, _ = occupy(tmp_path, False, CONFIG)
  files.write_json(workdir.config, dataclasses.asdict(CONFIG))
  lock.close()
  leftovers = (
    'status.json.123.tmp',
    'tape.jsonl.000001',
    'parameters.orbax-checkpoint-tmp-7',
  )
  for name in leftovers:
    (tmp_path / name).write_text('')
  _, lock, goes_on = occupy(tmp_path, False, CONFIG)
  lock.close()
  assert goes_on
  _, lock, _ = occupy(tmp_path, True, CONFIG)
  lock.close()
  assert [path.name for path in tmp_path.iterdir()] == ['lock']
