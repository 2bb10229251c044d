# SPDX-License-Identifier: Apache-2.0
"""Drives a headless Chromium by its DevTools protocol, over two pipes."""

import json
import os
import pathlib
import queue
import shutil
import subprocess
import threading

NAMES = (
  'chromium',
  'chromium-browser',
  'google-chrome',
  'google-chrome-stable',
)
WHY_NOT = None
if not any(map(shutil.which, NAMES)):
  WHY_NOT = f'needs a browser, one of {", ".join(NAMES)} (apt install chromium)'
ANSWER_S = 60.0
FLAGS = (
  '--headless=new',
  '--no-sandbox',  # There is none for root.
  '--disable-gpu',
  '--disable-dev-shm-usage',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--remote-debugging-pipe',
)


class Chromium:
  """One page of a browser; leaving the `with` block ends it.

  Attributes:
    errors: what the page's scripts did wrong, as the browser says it.
    asked: addresses that the page has asked for.

  Args:
    folder: an empty one, of the browser's own files.
  """

  def __init__(self, folder: pathlib.Path):
    self.errors: list[str] = []
    self.asked: list[str] = []
    to_it, self._write = os.pipe()
    self._read, from_it = os.pipe()
    binary = next(filter(None, map(shutil.which, NAMES)))
    # It reads what it is told from descriptor 3, and answers on 4.
    moved = f'exec "$0" "$@" 3<&{to_it} 4>&{from_it}'
    with (folder / 'log').open('wb') as log:
      self._popen = subprocess.Popen(
        [
          *('bash', '-c', moved, binary),
          *FLAGS,
          f'--user-data-dir={folder / "profile"}',
          'about:blank',
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(to_it, from_it),
      )
    os.close(to_it)
    os.close(from_it)
    self._answers: queue.Queue = queue.Queue()
    self._sent = 0
    self._session: str | None = None
    self._reader = threading.Thread(target=self._listen)
    self._reader.start()

  def __enter__(self) -> 'Chromium':
    pages = self.ask('Target.getTargets')['targetInfos']
    target = next(x['targetId'] for x in pages if x['type'] == 'page')
    self._session = self.ask(
      'Target.attachToTarget', targetId=target, flatten=True
    )['sessionId']
    for domain in ('Page', 'Runtime', 'Log', 'Network'):
      self.ask(f'{domain}.enable')
    return self

  def __exit__(self, *exception):
    self._popen.kill()
    self._popen.wait()
    self._reader.join()
    os.close(self._write)
    os.close(self._read)

  def ask(self, method: str, **parameters) -> dict:
    """Returns the answer to one message of the protocol."""
    self._sent += 1
    message = {'id': self._sent, 'method': method, 'params': parameters}
    if self._session:
      message['sessionId'] = self._session
    os.write(self._write, json.dumps(message).encode() + b'\0')
    answer = self._answers.get(timeout=ANSWER_S)
    assert answer['id'] == self._sent and 'error' not in answer, answer
    return answer['result']

  def of(self, script: str):
    """Returns the value of an expression in the page."""
    found = self.ask('Runtime.evaluate', expression=script, returnByValue=True)
    assert 'exceptionDetails' not in found, (script, found)
    return found['result'].get('value')

  def show(self, width: int, dark: bool = False):
    """Gives the page a width in pixels, and a colour scheme."""
    self.ask(
      'Emulation.setDeviceMetricsOverride',
      width=width, height=900, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    scheme = {
      'name': 'prefers-color-scheme',
      'value': 'dark' if dark else 'light',
    }
    self.ask('Emulation.setEmulatedMedia', features=[scheme])

  def _listen(self):
    left = b''
    while data := os.read(self._read, 1 << 16):
      *whole, left = (left + data).split(b'\0')
      for each in map(json.loads, whole):
        if 'id' in each:
          self._answers.put(each)
        else:
          self._note(each['method'], each['params'])

  def _note(self, method: str, told: dict):
    match method:
      case 'Runtime.exceptionThrown':
        details = told['exceptionDetails']
        self.errors.append(str(details.get('exception', details)))
      case 'Log.entryAdded' if told['entry']['level'] == 'error':
        self.errors.append(
          f'{told["entry"]["text"]} {told["entry"].get("url")}'
        )
      case 'Network.requestWillBeSent':
        self.asked.append(told['request']['url'])
