# SPDX-License-Identifier: Apache-2.0
"""Checks how many steps lie between a copy and its update, lab beside run."""

import collections

import pytest

from diloco.config import run_config
from diloco.lab.run import train
from diloco.run.spec import make_run_spec
from diloco.sweeps import sweep
from experiments import common, overlap, study


def _in_the_lab(**lab) -> collections.Counter[int]:
  """Counts delays without a leader, as in the run below: s ≤ τ + 1."""
  config = common.quicktest(common.base())
  config.model.update(kind='bowl', layers=2)
  config.protocol.update(
    learners=1, quorum=1, fragments=1, sync_every_steps=7, overlap_steps=6
  )
  config.protocol.update(total_steps=77, grace_cap_steps=0.0)
  config.lab.update(jitter=0.0, slow_learners=0, **lab)
  run_spec = make_run_spec(run_config.build(config))
  return train(run_spec).tally.delays


@pytest.mark.parametrize(
  'latency_s,expected',
  # Three latencies and two transfers of 0.1 s, in steps of 1 s.
  [(0.01, 2), (0.3, 3), (0.7, 4)],
)
def test_the_lab_takes_in_an_update_as_late_as_the_loop_would(
  latency_s, expected
):
  delays = _in_the_lab(latency_s=latency_s)
  assert delays.most_common(1)[0][0] == expected, delays
  assert min(delays) >= 2, delays


@pytest.mark.parametrize('tau', [2, 12])
def test_the_study_of_overlap_has_the_delays_that_it_is_about(tau):
  """Runs the protocol of the study over its link, with a small model."""
  config = study.base('overlap')('quicktest,learners=4')
  config.model.update(kind='bowl', layers=8)
  asked = study.base('overlap')()
  config.protocol.update(
    {k: asked.protocol[k] for k in ('fragments', 'sync_every_steps')},
    total_steps=120,
  )
  variants = {x.label: x.changes for x in sweep.variants(overlap.sweep)}
  config.update_from_flattened_dict(variants[f'τ = {tau}, rebase'])
  run_spec = make_run_spec(run_config.build(config))
  found = train(run_spec).tally.mean_delay_steps
  assert found == pytest.approx(tau, rel=0.2)
