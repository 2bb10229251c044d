# SPDX-License-Identifier: Apache-2.0
"""A monitor serves the last that its process has told."""

import json
import math
import socket
import urllib.error
import urllib.request

import pytest
from absl import flags

from diloco.metrics import names
from diloco.monitoring import monitor_flags
from diloco.monitoring.monitor import Monitor
from tests.watch.test_followed_run import told

pytestmark = pytest.mark.beside


@pytest.fixture(name='monitor')
def fixture_monitor():
  monitor = Monitor('first', 'learner-1')
  yield monitor
  monitor.close()


def get(url: str) -> str:
  with urllib.request.urlopen(url, timeout=240) as answer:
    return answer.read().decode()


def test_the_last_scalars_are_metrics(monitor):
  monitor.write_scalars(7, {names.TRAIN_LOSS: 3.0, names.TIME: 12.5})
  monitor.write_scalars(8, {names.TRAIN_LOSS: 2.5, names.TIME: 13.5})
  lines = monitor.metrics().splitlines()
  labels = '{process="learner-1",run="first"}'
  assert f'diloco_train_loss{labels} 2.5' in lines
  assert f'diloco_step{labels} 8.0' in lines
  assert f'diloco_scalars_time_seconds{labels} 13.5' in lines
  assert not [line for line in lines if line.endswith(' 3.0')]


def test_the_process_itself_is_measured(monitor):
  assert 'process_resident_memory_bytes' in monitor.metrics()
  assert 'diloco_' not in monitor.metrics()


def test_an_incarnation_is_in_the_status_alone(monitor):
  monitor.write_scalars(1, {names.INCARNATION: 5.0, names.TRAIN_LOSS: math.nan})
  assert 'incarnation' not in monitor.metrics()
  found = monitor.status()
  assert found['scalars'] == {names.INCARNATION: 5.0, names.TRAIN_LOSS: None}
  assert (found['run'], found['process'], found['step']) == (
    'first', 'learner-1', 1,
  )  # fmt: skip
  assert 'diloco_train_loss{process="learner-1",run="first"} NaN' in (
    monitor.metrics()
  )


def test_the_syncer_serves_the_state_of_the_run(monitor):
  monitor.show(told(10, 5.0))
  assert monitor.status()['step'] == 10
  assert 'diloco_goodput_ratio{run="tests-tiny"} 0.9' in monitor.metrics()


def test_it_serves_until_it_is_closed(monitor):
  url = monitor.serve('127.0.0.1', 0)
  monitor.write_scalars(3, {names.TRAIN_LOSS: 1.0})
  assert json.loads(get(f'{url}status'))['step'] == 3
  assert 'diloco_train_loss' in get(f'{url}metrics')
  with pytest.raises(urllib.error.HTTPError, match='404'):
    get(url)
  monitor.close()
  with pytest.raises(urllib.error.URLError):
    get(f'{url}status')


@pytest.fixture(name='given')
def fixture_given(monkeypatch):
  values = flags.FlagValues()
  monkeypatch.setattr(flags, 'FLAGS', values)
  flags.DEFINE_string(monitor_flags.BIND, '', '', flag_values=values)
  flags.DEFINE_bool(monitor_flags.OPEN, False, '', flag_values=values)
  return lambda *argv: values(['x', *argv])


@pytest.mark.parametrize(
  ('bind', 'said'),
  [
    ('0.0.0.0:9100', 'other machines could .*--metrics_open'),
    ('9100', '--metrics_bind=9100: .*must be host:port'),
    ('127.0.0.1:99999', 'port ≤ 65535'),
  ],
)
def test_addresses_that_can_not_be(given, bind, said):
  given(f'--metrics_bind={bind}')
  with pytest.raises(ValueError, match=said):
    monitor_flags.begin('first', 'syncer')


def test_a_port_that_is_taken_is_no_reason_not_to_train(given, caplog):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    given(*monitor_flags.arguments('127.0.0.1', taken.getsockname()[1]))
    monitor_flags.begin('first', 'syncer').close()
  assert 'no metrics are served: Address already in use' in caplog.text


def test_flags_vouch_beyond_loopback_only():
  own = monitor_flags.arguments('127.0.0.1', 9100)
  assert own == ['--metrics_bind=127.0.0.1:9100']
  far = monitor_flags.arguments('$host', '$((9100 + 1))')
  assert far == ['--metrics_bind=$host:$((9100 + 1))', '--metrics_open']
