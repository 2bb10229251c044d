# SPDX-License-Identifier: Apache-2.0
"""`python -m launch.local`: what it refuses before a process is started."""

import dataclasses
import fcntl
import json
import os
import pathlib
import shlex
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
from launch import preflight
from launch.local import lacks_evaluation, occupy, still_due
from launch.preflight import free_address
from launch.program import on_this_machine, program
from tests.launch.forked import run_all
from tests.transport import credentials

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]
TINY = f'--config={ROOT}/experiments/tests_tiny.py'
CONFIG = run_config.build(tests_tiny.get_config())
# Arguments of `diloco local`, and what the one line says. DIR is replaced by a
# folder of the test.
REFUSED = (
  ('--workdir=', '--workdir: is missing, such as runs/first'),
  (
    '--config.model.layer=3',
    '--config.model.layer=3: unknown key model.layer, did you mean model.lay',
  ),
  (
    '--config.faults="(\'kill learner 9 at 0.1\',)"',
    'learner 9 of 2, ids start at 0',
  ),
  ('more', 'more: unexpected argument'),
  ('--workdir=/proc/nope', '--workdir=/proc/nope: no run can be kept there'),
  ('--workdir=gs://bucket/run', '--workdir=gs://bucket/run: must be a folder'),
  (
    '--config.checkpoint.folder=s3://bucket/run',
    "checkpoint.folder='s3://bucket/run': must be an absolute path or gs://",
  ),
  (
    '--config.checkpoint.folder=/proc/run',
    "checkpoint.folder='/proc/run': can not be written to: FileNotFoundError",
  ),
  (
    '--config.data.source=text --config.data.path=/no/such/text.txt',
    "data.path='/no/such/text.txt': there is nothing at this path",
  ),
  (
    '--config.data.source=parquet --config.data.path=/no/train-*.parquet',
    'there is nothing at this path',
  ),
  (
    '--config.data.source=mix --config.data.mix="(\'1 parquet /no/web\',)"',
    'there is nothing at this path',
  ),
  (
    '--config.data.source=text --config.data.path=DIR/mine.py',
    'bytes are too short, a text needs ',
  ),
  ('--config.inner.lr=nan', 'inner.lr=nan: must be finite'),
  ('--config.inner.weight_decay=inf', 'weight_decay=inf: must be finite'),
  ('--config.run.restart_delay_s=inf', 'restart_delay_s=inf: must be finite'),
  (
    '--config.protocol.grace_cap_steps=inf',
    'grace_cap_steps=inf, must be finite',
  ),
  (
    '--config.model.layers=two',
    'model.layers=two: must be of type int, such as ',
  ),
  ('--config.outer.nesterov=2', 'outer.nesterov=2: must be of type bool'),
  ('--config.transport.host=0.0.0.0', "transport.host='0.0.0.0': learners can"),
  (
    '--config.mesh.fsdp=2',
    'mesh.fsdp=2 * mesh.expert=1 * mesh.context=1 * mesh.tensor=1 = 2',
  ),
  ('--config.model.kind=nowhere:make', 'there is no module nowhere'),
  (
    '--config.model.kind=experiments.own_model:nope',
    f"='experiments.own_model:nope': {ROOT}/experiments/own_model.py has no ",
  ),
  ('--token_file=DIR/none', '--token_file=DIR/none: No such file'),
  ('--token_file=DIR/empty', '--token_file=DIR/empty: is empty'),
  ('--token_file=DIR/shown', '--token_file=DIR/shown: every user'),
  ('--tls_cert=DIR/run.pem', 'run.pem: needs --tls_key beside it'),
  (
    '--config.data.source=parquet --config.data.path=DIR/mine.py',
    "data.source='parquet': the package pyarrow is missing: pip install",
  ),
  (
    '--config.data.source=array_record --config.data.path=DIR/mine.py',
    "data.source='array_record': the package array_record is missing",
  ),
)
# A process that finds no such packages.
WITHOUT = 'import sys\nsys.modules.update(pyarrow=None, array_record=None)\n'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  made = tmp_path_factory.mktemp('own')
  credentials.copied(made, 'ours')
  for name, text, mode in (
    ('mine.py', 'def make(section):\n  pass\n', 0o600),
    ('empty', '', 0o600),
    ('shown', '0123456789abcdef\n', 0o644),
    ('run.pem', 'x', 0o600),
  ):
    (made / name).write_text(text)
    (made / name).chmod(mode)
  (made / 'site').mkdir()
  (made / 'site' / 'sitecustomize.py').write_text(WITHOUT)
  return made


@pytest.fixture(scope='module')
def refused(folder):
  """Returns what came of each command, by its words."""
  calls = []
  for words, _ in REFUSED:
    given = shlex.split(words.replace('DIR', str(folder)))
    calls.append(['launch.local', TINY, '--workdir=run', *given])
  places = os.pathsep.join((str(folder / 'site'), str(ROOT)))
  found = run_all(calls, cwd=folder, PYTHONPATH=places, JAX_PLATFORMS='cpu')
  return dict(zip((words for words, _ in REFUSED), found, strict=True))


@pytest.mark.parametrize(('words', 'line'), REFUSED, ids=lambda each: each[:40])
def test_it_is_said_before_a_process_starts(folder, refused, words, line):
  done = refused[words]
  assert done.code == 78, done.out + done.err
  assert done.out == ''
  assert done.err.startswith('error: ')
  assert done.err.count('\n') == 1, done.err
  assert line.replace('DIR', str(folder)) in done.err
  assert not (folder / 'run').exists()
  assert not (folder / 'gs:').exists()


@pytest.mark.parametrize(
  'source',
  [
    'if True:\n  def make(section):\n    pass',
    'try:\n  from fast import make\nexcept ImportError:\n  make = None',
    'from elsewhere import *',
    'def __getattr__(name):\n  return print',
    'def later():\n  global make',
    'no Python at all',
  ],
)
def test_a_function_that_may_be_there_is_left_to_its_process(
  tmp_path, monkeypatch, source
):
  (tmp_path / 'odd_model.py').write_text(source)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  preflight.check_own_code(changed('model', kind='odd_model:make'))


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


def test_two_shards_take_the_flag_of_how_all_log():
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'diloco.syncer_shard', TINY, '--log_json'),
      *('--workdir=nowhere', '--shard=9', '--leader=127.0.0.1:1'),
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


def test_variables_for_all_processes_are_for_the_last_evaluation_too(tmp_path):
  config = run_config.build(quickstart.get_config())
  asked = 'A=1', 'learner:B=2'
  parts = program(
    config, ['--config=x.py'], Workdir(tmp_path), 'localhost:7', asked=asked
  )
  of = {role.name: dict(role.environment) for role in parts.roles}
  assert of['syncer'] == dict(parts.evaluate.environment) == {'A': '1'}
  assert of['learner-0'] == {'A': '1', 'B': '2'}


def test_a_learner_of_two_processes_beside_one_of_one():
  given = quickstart.get_config()
  given.protocol.learners = 2
  given.faults = ()
  given.mesh.fsdp = 4
  config = run_config.build(given)
  _, first, second, _ = program(
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


# The folder of a run: what is taken, what goes on, and what is refused.


def occupied(root, config=CONFIG, overwrite=False) -> bool:
  """Returns whether the run in a folder goes on; gives the folder free."""
  _, lock, goes_on = occupy(root, overwrite, config)
  lock.close()
  return goes_on


def left(root, config=CONFIG, *names: str) -> None:
  """Makes a folder as a launcher leaves it that was stopped."""
  files.write_json(root / 'config.json', dataclasses.asdict(config))
  (root / 'logs').mkdir()
  (root / 'logs' / 'syncer.log').write_text('error: it can not run\n')
  for name in names:
    (root / name).write_text('{}')


def changed(section, **values):
  own = dataclasses.replace(getattr(CONFIG, section), **values)
  return dataclasses.replace(CONFIG, **{section: own})


def names_in(root) -> list[str]:
  return sorted(path.name for path in root.iterdir())


OTHER = changed('inner', lr=0.5)
OVER = ('summary.json', 'evaluation.json')


def test_an_empty_or_absent_folder_is_taken(tmp_path):
  assert not occupied(tmp_path / 'a' / 'b')
  assert (tmp_path / 'a' / 'b').is_dir()
  assert not occupied(tmp_path / 'a' / 'b')


def test_a_run_is_overwritten_only_when_asked(tmp_path):
  (tmp_path / 'logs').mkdir()
  (tmp_path / 'status.json').write_text('{}')
  with pytest.raises(ConfigError, match='--overwrite to remove that run'):
    occupied(tmp_path)
  occupied(tmp_path, overwrite=True)
  assert names_in(tmp_path) == ['lock']


def test_overwriting_removes_checkpoints_elsewhere_and_nothing_else(tmp_path):
  there = tmp_path / 'there'
  for name in ('learner-0', 'shard-1', 'syncer', 'of another'):
    (there / name).mkdir(parents=True)
  config = changed('checkpoint', folder=str(there))
  assert not occupied(tmp_path / 'run', config), 'a new disk, the same run'
  assert len(names_in(there)) == 4
  occupied(tmp_path / 'run', config, overwrite=True)
  assert names_in(there) == ['of another']


def test_a_run_stays_with_its_folder_of_checkpoints(tmp_path):
  left(tmp_path)
  (tmp_path / 'checkpoints').mkdir()
  with pytest.raises(
    ConfigError, match=r"a run with checkpoint\.folder=''; give"
  ):
    occupied(tmp_path, changed('checkpoint', folder='/elsewhere'))


@pytest.mark.parametrize('text', ['', '{}', '[1', '{"run": 7}'])
def test_a_broken_status_decides_nothing(tmp_path, text):
  """It is a view of the run, which the syncer soon replaces."""
  (tmp_path / 'status.json').write_text(text)
  assert still_due((), CONFIG, Workdir(tmp_path)) == ()


@pytest.mark.parametrize('theirs', [CONFIG, changed('run', restarts_max=99)])
def test_a_run_that_was_stopped_goes_on(tmp_path, theirs):
  """A file that a full disk has left behind does not keep it from that."""
  leftovers = (
    *('status.json.123.tmp', 'tape.jsonl.000001'),
    'parameters.orbax-checkpoint-tmp-7',
  )
  left(tmp_path, theirs, *leftovers)
  assert occupied(tmp_path)
  assert {'logs', *leftovers} <= {*names_in(tmp_path)}
  occupied(tmp_path, overwrite=True)
  assert names_in(tmp_path) == ['lock']


def test_a_start_that_failed_claims_no_folder(tmp_path):
  """No step was made: another run may take its place."""
  left(tmp_path, OTHER)
  assert not occupied(tmp_path)
  assert names_in(tmp_path) == ['lock']


@pytest.mark.parametrize(
  ('theirs', 'mine', 'there', 'words'),
  [
    (OTHER, CONFIG, 'checkpoints', r'inner\.lr: \S+ here, 0\.5 there'),
    (CONFIG, CONFIG, OVER, 'above 60 extends it; give another'),
    (
      CONFIG,
      changed('protocol', total_steps=30),
      OVER[:1],
      r'total_steps: 30 here, 60 there',
    ),
  ],
)
def test_another_run_is_named_by_what_differs(
  tmp_path, theirs, mine, there, words
):
  left(tmp_path, theirs, *([there] if isinstance(there, str) else there))
  with pytest.raises(ConfigError, match=words):
    occupied(tmp_path, mine)


def test_a_run_that_is_over_is_extended_or_evaluated(tmp_path):
  longer, workdir = changed('protocol', total_steps=90), Workdir(tmp_path)
  left(tmp_path)
  assert not lacks_evaluation(workdir, CONFIG)
  workdir.summary.write_text('{}')
  assert occupied(tmp_path) and occupied(tmp_path, longer)
  assert lacks_evaluation(workdir, CONFIG)
  assert not lacks_evaluation(workdir, longer)


@pytest.mark.parametrize('overwrite', [False, True])
def test_a_folder_of_something_else_is_never_touched(tmp_path, overwrite):
  (tmp_path / 'logs').mkdir()
  (tmp_path / 'thesis.tex').write_text('x')
  with pytest.raises(ConfigError, match=r"holds 'thesis\.tex', which is not"):
    occupied(tmp_path, CONFIG, overwrite)
  assert names_in(tmp_path) == ['logs', 'thesis.tex']
  with pytest.raises(ConfigError, match='is a file, give a folder'):
    occupied(tmp_path / 'thesis.tex', CONFIG, overwrite)


def test_a_folder_in_use_is_refused(tmp_path):
  with (tmp_path / 'lock').open('ab') as other:
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match='another launcher is running'):
      occupied(tmp_path, CONFIG, overwrite=True)


def test_a_free_port_is_found():
  host, _, port = free_address('127.0.0.1', 0).rpartition(':')
  assert host == '127.0.0.1'
  # An outgoing connection does not take it before the syncer is there.
  sources = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')
  first = int(sources.read_text().split()[0]) if sources.exists() else 0
  assert 0 < int(port) < (first if first > 10_001 else 65_536)


def test_an_address_that_can_not_be_is_refused():
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=rf'port={port}: is in use'):
      free_address('127.0.0.1', port)
  with pytest.raises(ConfigError, match='can not be resolved'):
    free_address('no-such-host.invalid', 0)
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
