# SPDX-License-Identifier: Apache-2.0
"""Writes a run's final model for other tools: python -m diloco.export …

  python -m diloco.export RUN \\
    --outdir=DIR [--task=experiments/tasks/continuation.jsonl]

The configuration is that in RUN, unless there is a --config.

Leaves model.safetensors, config.json and generation_config.json in --outdir:
tensors one per layer, by the names of the architecture that the weights came as
(`model.init_from`), or of one that computes the same: Granite or its mixture of
experts, whose configs have the two factors that our decoder has beside Llama,
unless keys say otherwise. `diloco/models/hf_format.py` says what maps to what.
Adapters (`model.lora_rank`) are added to their matrices.

Beside them the tokenizer: tokenizer.json of runs of bytes or with a file of
`tokenizers`, tokenizer.model of sentencepiece; all files of the one that came
with the weights. With --task the questions of a task file lie there, too, and a
YAML file by which lm-eval asks them of the exported model. Needs the package
safetensors, which the extra `export` has.
"""

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Mapping

import numpy as np
from absl import flags

from diloco.config import config_files, pretrained
from diloco.config import flags as config_flags
from diloco.config.run_config import RunConfig
from diloco.evaluation.export_files import exported_files, task_files
from diloco.evaluation.final_evaluation import final_parameters
from diloco.metrics.run_progress import ProgressLine
from diloco.metrics.workdir import Workdir
from diloco.models import hf_format, lora
from diloco.run.command import run_command
from diloco.run.spec import decoder_config, make_run_spec

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_OUTDIR = flags.DEFINE_string('outdir', None, 'Folder to write into.')
_TASK = flags.DEFINE_string(
  'task', None, 'File of questions, JSON lines, to be asked by lm-eval.'
)


def main(config) -> int:
  """Writes the folder; 78 where there is nothing that could be written."""
  outdir = pathlib.Path(_OUTDIR.value)
  with ProgressLine() as line:
    tensors, files = _exported(config, outdir, line.say)
    line.say(f'writes {sum(x.nbytes for x in tensors.values()):,} bytes')
    from diloco.checkpoint import safetensors_files

    safetensors_files.write_exported(outdir, tensors, files)
  print(
    f'{len(tensors)} tensors in {outdir}, with {", ".join(files)}',
    file=sys.stderr,
  )
  return 0


def _exported(
  config: RunConfig, outdir: pathlib.Path, say: Callable[[str], None]
) -> tuple[Mapping[str, np.ndarray], dict[str, Mapping | bytes]]:
  """Returns tensors and other files; exits with 78 where there can be none."""
  with config_flags.refusing():
    if importlib.util.find_spec('safetensors') is None:
      raise ValueError(
        'the package safetensors is missing: pip install safetensors, or '
        "this package with its extra 'export'"
      )
    if outdir.exists() and not outdir.is_dir():
      raise ValueError(f'--outdir={outdir}: is not a folder')
    sizes = decoder_config(config)
    hf_format.family_of(sizes)
    say('reads the model')
    adapts = bool(config.model.lora_rank)
    run_spec = make_run_spec(config, reads_weights=adapts)
    tokenizer, seq_len = run_spec.text.tokenizer, config.data.seq_len
    workdir = Workdir(pathlib.Path(_WORKDIR.value))
    came_with = pretrained.kept_files(workdir.pretrained)
    files = exported_files(sizes, seq_len, tokenizer, came_with)
    if _TASK.value is not None:
      task = pathlib.Path(config_files.find(_TASK.value))
      files |= task_files(task, outdir, tokenizer, seq_len)
    params = final_parameters(run_spec, workdir)
    if adapts:
      say('adds the adapters to what they are beside')
      params |= run_spec.weights.whole(run_spec.read_shapes)
      params = lora.merged(sizes, params)
  say('cuts it into tensors')
  return hf_format.Tensors(sizes).exported(params), files


if __name__ == '__main__':
  run_command(main, required=['workdir', 'outdir'], of_run=True)
