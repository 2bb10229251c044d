# SPDX-License-Identifier: Apache-2.0
"""The stage of a whole cluster, and the configuration of all stages."""

import dataclasses

from diloco.protocol.config import ProtocolConfig
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.cluster import Cluster, ClusterOptions, Timing
from diloco.simulator.engine import Observer
from tests.protocol import reading

DEFAULTS = {f.name: f.default for f in dataclasses.fields(ProtocolConfig)} | {
  'learners': 3,
  'fragments': 2,
  'sync_every_steps': 4,
  'overlap_steps': 2,
  'quorum': 1,
  'grace_safety': 0.5,
  'grace_cap_steps': 1.0,
  'max_staleness_versions': 2,
  'patience': 0.5,  # 5 s of silence, and more with steps over 0.8 s.
  'total_steps': 1000,
  'blend': 'replace',
}


def config_of(options: dict) -> ProtocolConfig:
  return ProtocolConfig(**{**DEFAULTS, **options})


class DecisionLog(Observer):
  """An observer that keeps the syncer's decisions, with times in seconds."""

  def __init__(self):
    self.merges: list[tuple[float, syncer_events.Merge]] = []
    self.records: list[tuple[float, syncer_events.LogDecision]] = []

  def at_syncer(self, syncer, event, effects):
    for effect in effects:
      match effect:
        case syncer_events.Merge():
          self.merges.append((syncer.now, effect))
        case syncer_events.LogDecision() | syncer_events.LogReformed():
          self.records.append((syncer.now, effect))


class ClusterStage:
  """A syncer and its learners, all real machines, under a simulated clock."""

  def __init__(
    self,
    step_s=1.0,
    slow=(),
    jitter=0.0,
    seed=1,
    checkpoint_rounds=1,
    checkpoint_steps=None,
    slices=(),
    slice_copy_steps=1,
    **options,
  ):
    self._config = config_of(options)
    learners = self._config.learners
    factors = dict.fromkeys(range(learners), 1.0) | dict(slow)
    self._log = DecisionLog()
    self._cluster = Cluster(
      self._config,
      Timing({m: step_s * f for m, f in factors.items()}, jitter=jitter),
      seed,
      observer=self._log,
      options=ClusterOptions(
        checkpoint_rounds=checkpoint_rounds,
        checkpoint_steps=checkpoint_steps,
        slices=dict(slices),
        slice_copy_steps=slice_copy_steps,
      ),
    )
    self._reported = 0
    self._recorded = 0
    for learner in range(learners):
      self._cluster.start(learner)

  def say(self, command: str, options: dict) -> list[str]:
    if command == 'run':
      self._cluster.run(options['until'])
    else:
      getattr(self._cluster, command)(**options)
    return []

  def status(self) -> list[str]:
    """Rounds and participation since the last time that it was asked."""
    cluster = self._cluster
    snapshot = cluster.syncer.machine.snapshot()
    steps = ' '.join(f'{m}:{p.steps}' for m, p in cluster.learners.items())
    merges = self._log.merges[self._reported :]
    self._reported = len(self._log.merges)
    lines = [
      f'at {cluster.sim.now:.1f} s: step {snapshot.step}, '
      f'{len(merges)} rounds more, own steps {steps}'
    ]
    for learner in cluster.learners:
      row = ''.join(
        'x' if any(s.learner == learner for s in merge.shares) else '.'
        for _, merge in merges[-40:]
      )
      lines.append(f'  {learner} |{row}|')
    return lines

  def records(self) -> list[str]:
    """Returns what the syncer has decided since the last call."""
    records = self._log.records[self._recorded :]
    self._recorded = len(self._log.records)
    return [f'{at:.2f} s: {reading.of_syncer(r)}' for at, r in records]
