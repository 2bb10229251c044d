# SPDX-License-Identifier: Apache-2.0
"""A launcher that was asked for a page serves it as long as it runs."""

import re
import signal
import socket
import urllib.error
import urllib.request

import pytest

from tests.processes.processes import EXIT_CONFIG, Processes

pytestmark = pytest.mark.beside


def _get(url: str) -> str:
  try:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
      return answer.read().decode()
  except urllib.error.URLError:
    return ''


def test_the_page_of_a_run_that_goes_on(tmp_path):
  with Processes(tmp_path, 'protocol.total_steps=100000') as processes:
    launcher = processes.start('launcher', 'launch.local', '--page')

    def url() -> str:
      return ''.join(
        re.findall(r'^page: (\S+)$', launcher.output, re.MULTILINE)
      )

    processes.until(url, 60.0, 'the launcher says where the page is')
    assert '<html' in _get(url())
    processes.until(
      lambda: '"step"' in _get(f'{url()}status'), 120.0, 'a status is served'
    )
    launcher.send(signal.SIGINT)
    assert processes.exit_code(launcher, 60.0) == 130, processes.tails()
    assert not _get(url())


def test_a_port_that_is_taken(tmp_path):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    with Processes(tmp_path) as processes:
      launcher = processes.start(
        'launcher', 'launch.local', f'--page_port={port}'
      )
      assert processes.exit_code(launcher, 60.0) == EXIT_CONFIG
    (error,) = launcher.errors
    assert f'--port={port}: Address already in use' in error
