# SPDX-License-Identifier: Apache-2.0
"""Prints the event tape of a run as a timeline: python -m diloco.tape RUN

  python -m diloco.tape RUN [--learner=1] [--from_s=60] [--to_s=90] \\
    [--kind=round,lost]

A round's row: fragment p, version v, global step t; for each learner that was
merged its weight and how long its offer had waited (* is against an older
base); why the window ended. Steps at which a learner offers and takes in
fragments are shown with --learner, or where --kind asks for them.
"""

import math
import pathlib

from absl import flags

from diloco.config import flags as config_flags
from diloco.metrics.files import MalformedFile
from diloco.metrics.workdir import Workdir
from diloco.replay import timeline
from diloco.run.tape_events import read_tapes

_LEARNER = flags.DEFINE_integer(
  'learner', None, 'Only what concerns this learner, all of its tape.'
)
_FROM_S = flags.DEFINE_float('from_s', 0.0, 'Seconds from the start.')
_TO_S = flags.DEFINE_float('to_s', math.inf, 'Seconds from the start.')
_KIND = flags.DEFINE_list(
  'kind', [], 'Only these, such as round, lost, joined, snapshot.'
)


def main(argv) -> int:
  """Prints; 78 where the tape can't be read."""
  with config_flags.refusing(MalformedFile, ValueError, FileNotFoundError):
    tapes = read_tapes(Workdir(pathlib.Path(argv[1])))
    shown = timeline.chosen(
      timeline.timeline_rows(tapes),
      _LEARNER.value,
      _FROM_S.value,
      _TO_S.value,
      frozenset(_KIND.value),
    )
  for row in timeline.text(shown):
    print(row)
  for path in tapes.torn:
    print(f'{path}: the last line is torn, left out')
  return 0


if __name__ == '__main__':
  config_flags.run_of_runs(main)
