# SPDX-License-Identifier: Apache-2.0
"""Files for other tools: they read what was written."""

import json

import numpy as np
import safetensors.numpy

from diloco.checkpoint import safetensors_files as files

TENSORS = {
  'a.weight': np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
  'b.weight': np.array([-0.0, np.inf, 1e-45], np.float32),
}


def test_tensors_and_config_are_read_back(tmp_path):
  beside = {files.CONFIG: {'notes': ['é', 1.5]}, 'words': b'\xff'}
  files.write_exported(tmp_path / 'out', TENSORS, beside)
  tensors = safetensors.numpy.load_file(tmp_path / 'out' / files.WEIGHTS)
  config = json.loads((tmp_path / 'out' / files.CONFIG).read_text())
  assert config == {'notes': ['é', 1.5]}
  assert tensors.keys() == TENSORS.keys()
  for name, x in TENSORS.items():
    assert tensors[name].tobytes() == x.tobytes(), name
  left = sorted(path.name for path in (tmp_path / 'out').iterdir())
  assert left == [files.CONFIG, files.WEIGHTS, 'words']
  assert (tmp_path / 'out' / 'words').read_bytes() == b'\xff'


def test_readers_see_whose_conventions_these_are(tmp_path):
  files.write_exported(tmp_path, TENSORS, {})
  with safetensors.safe_open(tmp_path / files.WEIGHTS, 'np') as opened:
    assert opened.metadata() == {'format': 'pt'}
