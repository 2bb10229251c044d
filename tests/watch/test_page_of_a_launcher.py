# SPDX-License-Identifier: Apache-2.0
"""A launcher that was asked for a page serves it as long as it runs."""

import dataclasses
import http.client
import io
import json
import os
import pathlib
import re
import signal
import socket
import urllib.request

import pytest
import rich.console

from diloco.config import run_config
from diloco.metrics.workdir import Workdir
from experiments import tests_tiny
from launch import session
from tests.processes.processes import EXIT_CONFIG, START_S, Processes

pytestmark = pytest.mark.beside


def _get(url: str) -> str:
  try:
    with urllib.request.urlopen(url, timeout=60.0) as answer:
      return answer.read().decode()
  except (OSError, http.client.HTTPException):  # It is slow, or not there.
    return ''


def test_the_page_of_a_run_that_goes_on(tmp_path):
  with Processes(tmp_path, 'protocol.total_steps=100000') as processes:
    launcher = processes.start('launcher', 'launch.local', '--page')

    def url() -> str:
      return ''.join(
        re.findall(r'^page: (\S+)$', launcher.output, re.MULTILINE)
      )

    processes.until(url, START_S, 'the launcher says where the page is')
    processes.until(
      lambda: '<html' in _get(url()), START_S, 'the page is served'
    )
    processes.until(
      lambda: '"step"' in _get(f'{url()}status'), START_S, 'a status is served'
    )
    launcher.send(signal.SIGINT)
    assert processes.exit_code(launcher) == 130, processes.tails()
    assert not _get(url())


def test_a_warning_before_the_address_is_passed_over(tmp_path, monkeypatch):
  """A library may not like its version, and say so on standard error."""
  warning = "import sys; print('Warning: old', file=sys.stderr, flush=True)"
  (tmp_path / 'sitecustomize.py').write_text(warning)
  setup = dataclasses.asdict(run_config.build(tests_tiny.get_config()))
  (tmp_path / 'config.json').write_text(json.dumps(setup))
  places = str(tmp_path), str(pathlib.Path(__file__).parents[2])
  monkeypatch.setenv('PYTHONPATH', os.pathsep.join(places))
  said = io.StringIO()
  with session.page(Workdir(tmp_path), 0, rich.console.Console(file=said)):
    assert said.getvalue().startswith('page: http://127.0.0.1:')


def test_a_port_that_is_taken(tmp_path):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    with Processes(tmp_path) as processes:
      launcher = processes.start(
        'launcher', 'launch.local', f'--page_port={port}'
      )
      assert processes.exit_code(launcher) == EXIT_CONFIG
    (error,) = launcher.errors
    assert f'--port={port}: Address already in use' in error
