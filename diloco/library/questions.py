# SPDX-License-Identifier: Apache-2.0
"""Questions of planning: a fleet by simulation, a run's needs by arithmetic."""

import importlib
import os
import pathlib
from collections.abc import Callable, Mapping

from diloco.config import config_files, simulation
from diloco.config.sections import ConfigError
from diloco.config.simulation import SimulationConfig
from diloco.models.flops import PER_PARAMETER
from diloco.pages.parts import ReportPage
from diloco.prediction import report as prediction
from diloco.prediction.recorded import NotPredictable
from diloco.sizing import planner
from diloco.sizing.planner import RunPlan, Situation


def simulate(
  config: str | os.PathLike | Mapping | SimulationConfig | None = None,
  changes: Mapping[str, object] | None = None,
  replay: str | os.PathLike | None = None,
  seeds: int = 8,
  say: Callable[[str], object] = lambda line: None,
) -> ReportPage:
  """Simulates a fleet: a study's configuration, or a run that was made.

  Args:
    config: a file such as 'experiments/goodput.py:quicktest', or a mapping of
      the keys that differ from their defaults, such as {'study': {'kind':
      'goodput'}}; chips, seconds, Gbit/s.
    changes: values by dotted key, such as {'failures.mtbi_days': 30.0}.
    replay: folder of a run of processes, in place of a configuration: its kills
      are repeated, and its goodput is predicted.
    seeds: predictions of `replay`.
    say: takes how far it is.

  Returns:
    Tables and charts as values, in `parts`; a notebook shows them. The same
    seed gives the same figures.

  Raises:
    ConfigError: there is no such file or key, or the run can't be predicted.
  """
  if (config is None) == (replay is None):
    raise ConfigError('config, replay: give one of them')
  if replay is not None:
    try:
      return prediction.report(pathlib.Path(replay), seeds, say)
    except NotPredictable as error:
      raise ConfigError(f'replay: {error}') from None
  if changes or not isinstance(config, SimulationConfig):
    config = simulation.build(config_files.given(config, changes))
  study = importlib.import_module(f'diloco.studies.{config.study.kind}')
  return study.report(config, say)


def check(
  config: SimulationConfig, say: Callable[[str], object] = lambda line: None
) -> tuple[ReportPage, bool]:
  """Simulates what the paper has figures of, and says whether they are met.

  Raises:
    ConfigError: the study has no such check.
  """
  study = importlib.import_module(f'diloco.studies.{config.study.kind}')
  if not hasattr(study, 'check'):
    raise ConfigError(
      [f'--check: is of study.kind=goodput, not of {config.study.kind}']
    )
  return study.check(config, say)


def plan(
  params: float | str,
  on: str = '',
  step_tokens: int = planner.STEP_TOKENS,
  **situation: float | int | str,
) -> RunPlan:
  """Plans a run by arithmetic: settings, bytes, times, goodput, memory.

  Args:
    params: parameters of the model: 12e9, or '12B'.
    on: learners and the TPU slice of each, such as '4xv5e-256'; it says
      `learners`, `chips`, `hosts` and, by `step_tokens`, `step_s`.
    step_tokens: tokens of a step of a learner, with `on`.
    **situation: the other fields of `diloco.sizing.planner.Situation`:
      learners, bandwidth_gbps (of a learner's link, each way) and step_s
      (seconds), which are needed; chips, mtbi_days, pause_s, repair_s, codec,
      latency_s, hosts, slices (of each learner: groups of hosts that fail
      together).

  Returns:
    The plan; printed, it is the screen of `diloco plan`. `plan.protocol` has
    the suggested settings, `plan.goodput` the share of the time in steps.

  Raises:
    ConfigError: a value is missing, or makes no sense.
  """
  count = planner.parse_count(params)
  if on:
    if twice := [x for x in planner.SAID_BY_ON if x in situation]:
      raise ConfigError([f'{name}: on={on!r} says it' for name in twice])
    flops = PER_PARAMETER * count * step_tokens  # Without attention.
    slices = max(1, situation.get('slices', 1))
    said = planner.on_slices(on, flops, step_tokens, slices)
    if 'step_s' in situation:
      said['step_tokens'] = 0  # It was not computed.
    situation = said | situation
  needed = ('learners', 'bandwidth_gbps', 'step_s')
  known = {f for f in Situation.__dataclass_fields__ if f != 'params'}
  problems = [f'{name}: is missing' for name in needed if name not in situation]
  problems += [
    f'{name}: unknown, must be one of {", ".join(sorted(known))}'
    for name in sorted(situation.keys() - known)
  ]
  if problems:
    raise ConfigError(problems)
  return RunPlan(Situation(count, **situation))
