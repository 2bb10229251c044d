# SPDX-License-Identifier: Apache-2.0
"""Writes a run's final model for other tools: python -m diloco.export …

  python -m diloco.export --workdir=DIR \\
    --outdir=DIR

The configuration is that in DIR, unless there is a --config.

Leaves model.safetensors, config.json and generation_config.json in --outdir:
tensors one per layer, by the names of Llama, and a config of the kind
`granite`, which is Llama with the two factors that our decoder has.
`diloco/models/hf_export.py` says what maps to what. Beside them the tokenizer:
tokenizer.json of runs of bytes or with a file of `tokenizers`, tokenizer.model
of sentencepiece. Needs the package safetensors, which the extra `export` has.
"""

import importlib.util
import pathlib
import sys
from collections.abc import Mapping

from absl import flags

from diloco.config import flags as config_flags
from diloco.data.tokenizers import Tokenizer
from diloco.evaluation.final_parameters import final_parameters
from diloco.metrics.workdir import Workdir
from diloco.models import hf_export
from diloco.models.decoder_config import DecoderConfig
from diloco.run.command import run_command
from diloco.run.spec import decoder_config, make_run_spec

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_OUTDIR = flags.DEFINE_string('outdir', None, 'Folder to write into.')


def main(config) -> int:
  """Writes the folder; 78 where there is nothing that could be written."""
  outdir = pathlib.Path(_OUTDIR.value)
  with config_flags.refusing():
    if importlib.util.find_spec('safetensors') is None:
      raise ValueError(
        'the package safetensors is missing: pip install safetensors, or '
        "this package with its extra 'export'"
      )
    if outdir.exists() and not outdir.is_dir():
      raise ValueError(f'--outdir={outdir}: is not a folder')
    sizes = decoder_config(config)
    hf_export.check_exportable(sizes)
    run_spec = make_run_spec(config)
    params = final_parameters(run_spec, Workdir(pathlib.Path(_WORKDIR.value)))
  from diloco.checkpoint import safetensors_files

  tensors = hf_export.to_exported(params, sizes)
  files = exported_files(sizes, config.data.seq_len, run_spec.text.tokenizer)
  safetensors_files.write_exported(outdir, tensors, files)
  print(
    f'{len(tensors)} tensors in {outdir}, with {", ".join(files)}',
    file=sys.stderr,
  )
  return 0


def exported_files(
  sizes: DecoderConfig, seq_len: int, tokenizer: Tokenizer
) -> dict[str, Mapping | bytes]:
  """Returns what lies beside the tensors, by its name."""
  name, content = tokenizer.exported or ('', b'')
  kind = tokenizer.name.partition(':')[0]
  said = (
    f'Tokens are those of {kind!r}, {f"in {name}" if name else "not exported"};'
    f' token {tokenizer.end} ends each document, none begins it.'
  )
  settings = hf_export.exported_config(sizes, seq_len, tokenizer.end, said)
  files = {
    'config.json': settings,
    'generation_config.json': hf_export.generation_config(
      seq_len, tokenizer.end
    ),
  }
  if name:
    files[name] = content
  if name.endswith('.json'):
    files['tokenizer_config.json'] = hf_export.tokenizer_config(
      seq_len, tokenizer.end_text
    )
  return files


if __name__ == '__main__':
  run_command(main, required=['workdir', 'outdir'], of_run=True)
