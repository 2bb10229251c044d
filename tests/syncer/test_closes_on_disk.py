# SPDX-License-Identifier: Apache-2.0
"""A close is on the disk before any learner is told, if the run asks for it."""

import dataclasses
import os
import pathlib

import pytest

from diloco.protocol import messages
from diloco.run.spec import RunSpec
from tests.syncer.spoken import Stage

pytestmark = pytest.mark.beside


@pytest.mark.parametrize('asked', [True, False])
def test_the_ledger_and_its_name_are_forced_to_the_disk(
  asked, small_run, tmp_path, monkeypatch
):
  """Bytes first, then the folder that names them; both before the update."""
  config = small_run.config
  checkpoint = dataclasses.replace(config.checkpoint, fsync=asked)
  config = dataclasses.replace(config, checkpoint=checkpoint)
  done: list[tuple[str, str]] = []
  fsync, replace = os.fsync, os.replace

  def recorded_fsync(descriptor: int):
    path = pathlib.Path(os.readlink(f'/proc/self/fd/{descriptor}'))
    done.append(('fsync', path.name))
    fsync(descriptor)

  def recorded_replace(source, target):
    done.append((pathlib.Path(source).name, pathlib.Path(target).name))
    replace(source, target)

  monkeypatch.setattr(os, 'fsync', recorded_fsync)
  monkeypatch.setattr(os, 'replace', recorded_replace)
  stage = Stage(dataclasses.replace(small_run, config=config), tmp_path)
  stage.start()
  try:
    peer = stage.peer(0).join()
    peer.train(config.protocol.spacing_steps)
    peer.offer(1, 1e-3)
    peer.hear(messages.Update)
    new = f'ledger.json.{os.getpid()}.tmp'
    folder = stage.workdir.syncer.name
    forced = {'fsync': {new, folder}}
    order = [
      step
      for step in done
      if step == (new, 'ledger.json') or step[1] in forced.get(step[0], ())
    ]
    wanted = [('fsync', new), (new, 'ledger.json'), ('fsync', folder)]
    assert order[:3] == (wanted if asked else [wanted[1]])
  finally:
    stage.close()


def test_a_process_that_resumes_draws_no_parameters(
  small_run, tmp_path, monkeypatch
):
  drawn = []
  draw = RunSpec.initial_parameters
  monkeypatch.setattr(
    RunSpec, 'initial_parameters', lambda spec: drawn.append(1) or draw(spec)
  )
  first = Stage(small_run, tmp_path)
  first.start()
  try:
    first.close_a_round()
    theta = first.syncing._model.parameters()
  finally:
    first.close()
  assert drawn == [1]
  again = Stage(small_run, tmp_path)
  try:
    found = again.syncing._model.parameters()
    assert all((found[path] == theta[path]).all() for path in theta)
  finally:
    again.close()
  assert drawn == [1]
