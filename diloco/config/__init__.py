# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run and of a simulation, checked and frozen.

Start with `run_config`: `build` turns what a file of `experiments/` returns
into one `RunConfig`, or raises `ConfigError` with everything that is wrong.

  run_config    a run: its sections, and the rules between them
  unlike        what differs between the learners of a run
  sections      sections `model` to `transport`: keys, types, rules of each,
                how they are read, and which valid key is nearest
  data_section  section `data`: sources, tokenizers, mixes
  lab_section   sections `lab` and `faults`: runs in one process, planned kills
  simulation    a simulated fleet: network, failures, study
  flags         the flags that all commands share
  config_files  the files of --config: found, and filled with defaults
  hardware      TPU slices, chips, and the environment of a learner

Nothing here imports jax: launchers read it on machines without devices.
"""

from diloco.config.run_config import RunConfig, build
from diloco.config.sections import ConfigError

__all__ = ['ConfigError', 'RunConfig', 'build']
