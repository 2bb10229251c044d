# SPDX-License-Identifier: Apache-2.0
"""Writes a run's final model for other tools: python -m diloco.export …

  python -m diloco.export --workdir=DIR \\
    --outdir=DIR

The configuration is that in DIR, unless there is a --config.

Leaves model.safetensors and config.json in --outdir: tensors one per layer,
by the names of Llama, and a config of the kind `granite`, which is Llama with
the two factors that our decoder has. `diloco/models/hf_export.py` says what
maps to what. Needs the package safetensors: pip install -e '.[export]'.
"""

import importlib.util
import pathlib
import sys

from absl import flags

from diloco.config import flags as config_flags
from diloco.evaluation.final_parameters import final_parameters
from diloco.metrics.workdir import Workdir
from diloco.models import hf_export
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
        "the package safetensors is missing: pip install -e '.[export]'"
      )
    if outdir.exists() and not outdir.is_dir():
      raise ValueError(f'--outdir={outdir}: is not a folder')
    sizes = decoder_config(config)
    hf_export.check_exportable(sizes)
    run_spec = make_run_spec(config)
    params = final_parameters(run_spec, Workdir(pathlib.Path(_WORKDIR.value)))
  from diloco.checkpoint import safetensors_files

  tensors = hf_export.to_exported(params, sizes)
  settings = hf_export.exported_config(sizes, config.data.seq_len)
  safetensors_files.write_exported(outdir, tensors, settings)
  print(f'{len(tensors)} tensors in {outdir}', file=sys.stderr)
  return 0


if __name__ == '__main__':
  run_command(main, required=['workdir', 'outdir'], of_run=True)
