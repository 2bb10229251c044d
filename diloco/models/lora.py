# SPDX-License-Identifier: Apache-2.0
"""Makes one matrix of a matrix and its low-rank adapters (LoRA)."""

from collections.abc import Mapping

import numpy as np

from diloco.models.decoder_config import DecoderConfig


def merged(
  config: DecoderConfig, params: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns what computes the same without adapters: path -> f32 array.

  Args:
    params: path -> array of all parameters, adapters included.
  """
  whole = {path: params[path] for path in config.arrays}
  for path in config.adapted:
    a, b = (np.asarray(params[f'{path}_{end}'], np.float32) for end in 'ab')
    # One layer at a time: A · B is as large as the matrix.
    whole[path] = np.stack(
      [
        np.float32(x) + config.lora_scale * np.tensordot(a[i], b[i], 1)
        for i, x in enumerate(whole[path])
      ]
    )
  return whole
