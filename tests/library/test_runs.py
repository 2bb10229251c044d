# SPDX-License-Identifier: Apache-2.0
"""Runs of the lab as values, and what is said of configurations."""

import pathlib
import shutil
import tempfile

import numpy as np
import pytest

import diloco
from diloco.config import config_files
from diloco.config.sections import ConfigError
from tests.commands import output

SMALL = {
  'model': {'kind': 'bowl', 'd_model': 16, 'd_ff': 16},
  'data': {'source': 'grammar', 'seq_len': 16, 'grammar_bytes': 1 << 16},
  'inner': {'warmup_steps': 1},
  'protocol': {'fragments': 2, 'sync_every_steps': 4, 'overlap_steps': 2},
}
STEPS = {'protocol.total_steps': 12}


@pytest.fixture(scope='module', name='run')
def fixture_run():
  return diloco.lab(SMALL, changes=STEPS, say=None)


def test_a_run_of_the_lab_is_a_value(run):
  assert 'finished, step 12 of 12' in repr(run)
  assert run.losses[-1][1:] == (12, run.loss)
  assert set(run.learner_losses) == {0, 1}
  assert run.tokens == 128 * sum(1 for _ in run.recorded.steps)
  assert 0.5 < run.goodput < 1
  assert run.config.protocol.total_steps == 12
  assert [event.kind for event in run.events].count('round') == len(
    run.recorded.rounds
  )
  assert all(x.dtype == np.float32 for x in run.parameters.values())
  (tokens,) = run.tokenizer.encode([b'ab'])
  assert run.tokenizer.decode(tokens[:2].tolist()) == b'ab'


def test_a_notebook_shows_it(run):
  (part,) = run.timeline().parts
  assert {span.kind for span in part.spans} >= {'step', 'round'}
  html = run.timeline()._repr_html_()
  assert html.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
  assert '<script' not in html  # All of it is inside of the attribute.
  assert len(run._repr_html_()) > len(html)


def test_a_temporary_folder_goes_with_its_run(run):
  temporary = tempfile.TemporaryDirectory()
  folder = pathlib.Path(temporary.name)
  shutil.copy(run.folder / 'config.json', folder)
  made = diloco.Run(folder, temporary)
  del temporary
  assert folder.exists()
  del made
  assert not folder.exists()


def test_a_configuration_is_refused_before_a_device_is_touched():
  code = (
    "import diloco, sys\ntry: diloco.lab({'protocol': {'total_steps': 0}})\n"
    "except ValueError as error: print(error, 'jax' in sys.modules)"
  )
  said = output('-c', code)
  assert 'total_steps=0, must be at least 1' in said
  assert said.endswith(' False\n')


def test_folders_that_hold_no_run_are_named(tmp_path):
  with pytest.raises(ValueError, match=r'holds no run: no config\.json'):
    diloco.open_run(tmp_path)


def test_what_is_given_is_a_file_a_mapping_or_a_checked_value(run):
  given = config_files.given
  assert given(run.config).protocol.total_steps == 12
  mapping = {'protocol': {'learners': 3}}
  assert given(mapping, {'outer.lr': 0.5}).outer.lr == 0.5
  assert mapping == {'protocol': {'learners': 3}}
  assert given('experiments/train.py:learners=4').protocol.learners == 4
  for config, changes, said in (
    ('absent.py', None, "config='absent.py': no such file"),
    (7, None, 'config=7: must be a file such as'),
    ({}, {'protocol.total_step': 1}, 'did you mean protocol.total_steps?'),
  ):
    with pytest.raises(ConfigError, match=said.replace('?', '\\?')):
      given(config, changes)


def test_what_the_launcher_refuses_is_raised(tmp_path):
  """Such as a folder with other things in it, which only it looks at."""
  (tmp_path / 'thesis.tex').touch()
  with pytest.raises(ConfigError, match=r"holds 'thesis.tex', which is not"):
    diloco.train(SMALL, tmp_path, STEPS, say=lambda line: None)
