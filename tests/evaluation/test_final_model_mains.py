# SPDX-License-Identifier: Apache-2.0
"""Checks what can be done with a finished run: evaluate, draw text, export."""

import dataclasses
import json

import numpy as np
import pytest
from absl import flags as absl_flags
from safetensors.numpy import load_file

from diloco.checkpoint import safetensors_files
from diloco.checkpoint.parameters import write_parameters
from diloco.config import flags as config_flags
from diloco.config import run_config
from diloco.data import tasks
from diloco.data.tokenizers import make_tokenizer
from diloco.evaluation import export_files
from diloco.evaluation.final_evaluation import (
  checked_language,
  final_parameters,
)
from diloco.metrics import files, status
from diloco.metrics.workdir import Workdir
from diloco.models import hf_format
from diloco.run import choices
from diloco.run.spec import decoder_config, make_run_spec
from experiments import tests_tiny
from tests.commands import ROOT, python
from tests.data import made_files

TASK = ROOT / 'experiments' / 'tasks' / 'continuation.jsonl'


@pytest.fixture(scope='module')
def run_spec():
  return make_run_spec(run_config.build(tests_tiny.get_config()))


@pytest.fixture(scope='module')
def params(run_spec):
  """Returns the parameters of a model that has learnt nothing."""
  rng = np.random.default_rng(0)
  return {
    path: rng.standard_normal(spec.shape, np.float32) / 8
    for path, spec in run_spec.specs.items()
  }


@pytest.fixture(scope='module')
def workdir(run_spec, params, tmp_path_factory):
  workdir = Workdir(tmp_path_factory.mktemp('run'))
  files.write_json(workdir.config, dataclasses.asdict(run_spec.config))
  write_parameters(workdir.parameters, params)
  return workdir


def _run(main, workdir, *arguments):
  words = ('-m', f'diloco.{main}', workdir.root, *arguments)
  return python(*words, JAX_PLATFORMS='cpu')


CONFIG = '--config=experiments/tests_tiny.py'


def test_evaluate_scores_a_task(workdir):
  ended = _run('evaluate', workdir, f'--task={TASK}')
  assert ended.returncode == 0, ended.stderr
  lines = [line.strip() for line in ended.stdout.splitlines()]
  assert lines[0] == 'Validation loss of the global model'
  assert lines[1].split() == ['nats/byte', 'bits/byte']
  assert any(line.startswith('at the end ') for line in lines)
  task = lines[-1]
  assert task.startswith('continuation.jsonl, by byte: ')
  assert 'Evaluation(' not in ended.stdout + ended.stderr
  found = status.read_evaluation(workdir.evaluation)
  assert found.final_bits_per_byte == status.bits(found.final_loss)
  assert found.task.file == 'continuation.jsonl'
  assert found.task.questions == 256
  # It has learnt nothing, and by chance 1 of 4 is right.
  assert found.task.by_sum.low < found.task.chance == 0.25
  assert found.task.by_sum.high > 0.25


def test_generate_prints_prompt_and_text(workdir):
  ended = _run('generate', workdir, '--prompt=abc', '--length=20', '--top_k=0')
  assert ended.returncode == 0, ended.stderr
  assert ended.stdout.startswith('abc')
  assert len(ended.stdout) > len('abc\n')


@pytest.mark.soak
def test_a_model_of_word_pieces(params, tmp_path):
  """Evaluated per byte of text, too; what it draws is text again."""
  texts = made_files.texts()
  name = made_files.tokenizers_json(tmp_path / 'tokenizer.json', texts)
  shapes = {
    path: tuple(made_files.VOCAB if n == 256 else n for n in x.shape)
    for path, x in params.items()
  }
  workdir = Workdir(tmp_path)
  rng = np.random.default_rng(0)
  write_parameters(
    workdir.parameters,
    {p: rng.standard_normal(s, np.float32) / 8 for p, s in shapes.items()},
  )
  pieces = (
    '--config.data.source=parquet',
    f'--config.data.path={made_files.parquet(tmp_path / "parquet", texts)}',
    f'--config.data.tokenizer={name}',
    f'--config.data.index_path={tmp_path / "indices"}',
    f'--config.model.vocab={made_files.VOCAB}',
  )
  pieces = (CONFIG, *pieces)
  ended = _run('evaluate', workdir, *pieces)
  assert ended.returncode == 0, ended.stderr
  found = status.read_evaluation(workdir.evaluation)
  assert found.bigram_loss is found.unigram_loss is None
  assert 1.05 < found.bytes_per_token < 4
  assert found.final_bits_per_byte == pytest.approx(
    status.bits(found.final_loss) / found.bytes_per_token
  )
  drawn = _run('generate', workdir, *pieces, '--prompt=größer', '--length=9')
  assert drawn.returncode == 0, drawn.stderr
  assert drawn.stdout.startswith('größer')
  assert len(drawn.stdout) > len('größer\n')


def test_export_writes_the_parameters_under_other_names(
  workdir, run_spec, params, tmp_path
):
  ended = _run('export', workdir, f'--outdir={tmp_path / "out"}')
  assert ended.returncode == 0, ended.stderr
  tensors = load_file(tmp_path / 'out' / safetensors_files.WEIGHTS)
  text = (tmp_path / 'out' / safetensors_files.CONFIG).read_text()
  settings = json.loads(text)
  sizes = decoder_config(run_spec.config)
  expected = hf_format.Tensors(sizes).exported(params)
  assert tensors.keys() == expected.keys()
  for name, x in expected.items():
    np.testing.assert_array_equal(tensors[name], x, err_msg=name)
  assert settings['max_position_embeddings'] == 32
  said = "Tokens are those of 'bytes', in tokenizer.json"
  assert settings['notes'][0].startswith(said)
  rest = hf_format.exported_config(sizes, 32, 0, settings['notes'][0])
  assert settings == json.loads(json.dumps(rest))
  generation = (tmp_path / 'out' / 'generation_config.json').read_text()
  assert json.loads(generation) == {
    'do_sample': True,
    'eos_token_id': 0,
    'max_length': 32,
  }
  written = {path.name for path in (tmp_path / 'out').iterdir()}
  assert {'tokenizer.json', 'tokenizer_config.json'} <= written


def test_export_writes_a_task_for_lm_eval(workdir, tmp_path):
  out = tmp_path / 'out'
  ended = _run('export', workdir, f'--outdir={out}', f'--task={TASK}')
  assert ended.returncode == 0, ended.stderr
  assert (out / 'continuation.jsonl').read_bytes() == TASK.read_bytes()
  lines = (out / 'continuation.yaml').read_text().splitlines()
  assert 'task: diloco_continuation' in lines
  assert f'    test: "{out.resolve() / "continuation.jsonl"}"' in lines
  assert "target_delimiter: ''" in lines
  settings = dict(line.split(': ', 1) for line in lines if ': ' in line)
  fields = [settings[f'doc_to_{name}'] for name in ('text', 'choice', 'target')]
  assert fields == list(tasks.FIELDS)


def test_a_task_that_lm_eval_can_not_ask_ends_in_78(workdir, tmp_path):
  out = tmp_path / 'out'
  (tmp_path / 'bad.jsonl').write_text('{"context": "a"}\n')
  ended = _run(
    'export', workdir, f'--outdir={out}', f'--task={tmp_path}/bad.jsonl'
  )
  assert ended.returncode == 78
  assert 'bad.jsonl, line 1: missing or unknown fields' in ended.stderr
  assert not out.exists()
  name = made_files.sentencepiece_model(tmp_path / 'm', made_files.texts())
  with pytest.raises(ValueError, match='lm-eval reads a tokenizer'):
    export_files.task_files(TASK, out, make_tokenizer(name), 32)


def test_a_run_that_left_no_model_ends_in_78(tmp_path):
  none = Workdir(tmp_path / 'none')
  ended = _run('export', none, f'--outdir={tmp_path}', CONFIG)
  assert ended.returncode == 78
  assert 'no parameters at' in ended.stderr
  ended = _run('export', none, f'--outdir={tmp_path}')
  assert ended.returncode == 78
  assert ended.stderr == (
    f'error: {none.root}: holds no config.json; give the folder of a run\n'
  )


def test_keys_of_the_runs_own_configuration_can_be_changed(workdir):
  values = absl_flags.FlagValues()
  argv = [
    'generate', f'--workdir={workdir.root}', '--config.run.eval_batches=3',
    '--config.lab.step_s=2',
  ]  # fmt: skip
  config_flags.define_flags(values, argv)
  absl_flags.DEFINE_string('workdir', None, '', flag_values=values)
  config_flags.parse_of_run(argv, values)
  found = config_flags.load(values)
  recorded = run_config.build(tests_tiny.get_config())
  assert found == dataclasses.replace(
    recorded,
    run=dataclasses.replace(recorded.run, eval_batches=3),
    lab=dataclasses.replace(recorded.lab, step_s=2.0),
  )


def test_the_model_of_another_config_is_named(workdir, run_spec):
  changed = dataclasses.replace(
    run_spec,
    config=run_spec.config,
    specs={
      path: dataclasses.replace(spec, shape=(*spec.shape, 2))
      for path, spec in run_spec.specs.items()
    },
  )
  problem = r"'embedding' is of shape \[256, 32\], .* of shape \[256, 32, 2\]"
  with pytest.raises(ValueError, match=problem):
    final_parameters(changed, workdir)


def test_a_model_without_logits_is_refused_by_name(run_spec):
  model = choices.model(run_spec.config)
  assert checked_language(model, 'decoder') is model.language
  with pytest.raises(ValueError, match=r"model\.kind='bowl' is no language"):
    checked_language(model._replace(logits=None, language=None), 'bowl')


def test_only_a_decoder_has_a_decoders_size():
  raw = tests_tiny.get_config()
  raw.model.kind = 'bowl'
  with pytest.raises(ValueError, match="kind='bowl': this takes 'decoder'"):
    decoder_config(run_config.build(raw))
