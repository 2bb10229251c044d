# SPDX-License-Identifier: Apache-2.0
"""Indexes a run's data and prints what it is: python -m diloco.index_data …

  python -m diloco.index_data --config=experiments/NAME.py \\
    --config.data.source=parquet --config.data.path=DIR

A run does this by itself when it starts; for a large text that takes long, and
syncer and learners would wait. Several of these processes, also on several
machines that share `data.index_path`, share the work. No device is used.
"""

from diloco.config import flags
from diloco.config.unlike import tokens_per_step
from diloco.data import text_windows
from diloco.data.documents import Mixture
from diloco.metrics.run_progress import ProgressLine, counter
from diloco.run.command import run_command
from diloco.run.spec import load_text


def main(config) -> int:
  """Indexes what is missing and prints; 78 where the data won't do."""
  with ProgressLine() as line, flags.refusing():
    text = load_text(config, line.stay, counter(line.say, 'documents'))
  print(f'{text.name}, fingerprint {text.fingerprint[:16]}')
  taken = config.protocol.total_steps * tokens_per_step(config)
  for part, tokens, takes in (
    ('train', text.train, taken),
    ('held out', text.heldout, None),
  ):
    streams, weights = (tokens,), (1.0,)
    if isinstance(tokens, Mixture):
      streams, weights = tokens.streams, tokens.weights
    for stream, weight in zip(streams, weights):
      line = (
        f'{part}: {len(stream):,} tokens of '
        f'{text_windows.bytes_per_token(stream):.2f} bytes'
      )
      if takes is not None:
        epochs = takes * weight / sum(weights) / max(len(stream), 1)
        line += f', of which the run takes {epochs:.3g} epochs'
      print(line)
  return 0


if __name__ == '__main__':
  run_command(main, required=[])
