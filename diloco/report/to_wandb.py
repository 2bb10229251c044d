# SPDX-License-Identifier: Apache-2.0
"""Hands a run to Weights & Biases: python -m diloco.report.to_wandb RUN

Each process of the run becomes a run there, in a group with the name of RUN:
its scalars over the global step, and the configuration; the syncer's has all
figures of the run, by their names in `diloco.metrics.figures`. Nothing leaves
this machine unless WANDB_MODE=online says so: runs are files in ./wandb, which
`wandb sync` sends later. Training itself knows nothing of it.

Needs the package wandb: pip install -e '.[wandb]'.
"""

import importlib.util
import json
import os
import pathlib

from diloco.config import flags as config_flags
from diloco.config.sections import ConfigError
from diloco.metrics import figures, names, status
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import SYNCER, Workdir

PROJECT = 'diloco'
MODE = 'WANDB_MODE'
NO_SCALARS = ('step', names.TIME, names.INCARNATION, names.GLOBAL_STEP)


def main(argv) -> int:
  """Writes the runs; 78 where there is nothing to write, or no wandb."""
  workdir = Workdir(pathlib.Path(argv[1]))
  files = sorted(workdir.metrics('').parent.glob('*.jsonl'))
  if not files:
    raise ConfigError([f'{workdir.root}: holds no metrics of a run'])
  if importlib.util.find_spec('wandb') is None:
    raise ConfigError(
      ["the package wandb is missing: pip install -e '.[wandb]'"]
    )
  config = {}
  if workdir.config.exists():
    config = json.loads(workdir.config.read_text())
  import wandb  # An extra.

  group = workdir.root.resolve().name
  for path in files:
    records = read_jsonl(path)
    _write(wandb, path.stem, group, config, records)
    print(f'{path.stem}: {len(records)} records')
  run_status = status.of_run(workdir)
  if run_status is not None:
    _write(wandb, SYNCER, group, config, [], known_figures(run_status))
    print(f'{SYNCER}: the figures of the run')
  wandb.teardown()  # Waits until its files are whole.
  return 0


def known_figures(run_status: status.RunStatus) -> dict[str, float]:
  """Returns the figures of a run that are known, by their names."""
  values = figures.values(figures.RUN, run_status)
  return {name: x for name, x in values.items() if x is not None}


def _write(wandb, name: str, group: str, config, records, summary=None) -> None:
  """Writes a process's records, and its figures at the end.

  They are over the global step, which does not begin anew with a process.
  """
  run = wandb.init(
    project=PROJECT,
    group=group,
    name=name,
    config=config,
    mode=os.environ.get(MODE, 'offline'),
    settings=wandb.Settings(console='off', silent=True, x_disable_stats=True),
  )
  with run:
    run.define_metric('*', step_metric=names.BOARD_STEP)
    for record in records:
      scalars = {k: v for k, v in record.items() if k not in NO_SCALARS}
      step = record.get(names.GLOBAL_STEP, record['step'])
      run.log({names.BOARD_STEP: step, **scalars})
    run.summary.update(summary or {})


if __name__ == '__main__':
  config_flags.run_of_runs(main)
