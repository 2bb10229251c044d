# SPDX-License-Identifier: Apache-2.0
"""A learner's train loop: inner steps on its data shard, and boundaries."""

import jax

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.learner import syncer_client
from diloco.learner.boundaries import Boundaries
from diloco.learner.hosts.boundary_memory import BoundaryMemory
from diloco.learner.hosts.host_group import HostGroup
from diloco.learner.programs import LearnerPrograms
from diloco.learner.restore import RestoredState
from diloco.learner.train_state import SteppingState
from diloco.metrics.writer import Writer
from diloco.protocol import host_messages
from diloco.protocol.learner import events as learner_events
from diloco.run.event_log import LearnerEventLog
from diloco.run.spec import RunSpec
from diloco.run.step_profiler import Utilisation

REFORM_JOB = -2  # Others have larger numbers, but those of `HostGroup`.


class Reformed(Exception):
  """The boundary is in memory, from which a world of other slices goes on."""


class TrainLoop(Boundaries):
  """One learner's parameters, inner state and loop.

  Args:
    learner: the learner id, which also selects the data shard.
    programs: those of this process.
    restored: what the process starts from; it is consumed.
    memory: takes each boundary, of a learner with several slices.

  The others are those of `Boundaries`.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    learner: int,
    programs: LearnerPrograms,
    restored: RestoredState,
    client: syncer_client.SyncerClient,
    records: LearnerRecords,
    writer: Writer,
    tape: LearnerEventLog,
    notice_s: float,
    hosts: HostGroup | None = None,
    memory: BoundaryMemory | None = None,
  ):
    super().__init__(
      run_spec,
      learner,
      SteppingState(run_spec, learner, programs, restored, records, memory),
      restored,
      client,
      records,
      writer,
      tape,
      notice_s,
      hosts,
    )
    self._run_spec = run_spec
    self._memory = memory
    self._schedule = run_spec.schedule()
    self._batch = run_spec.config.data.batch
    self._tokens_per_step = programs.tokens_per_step
    kind = jax.local_devices()[0].device_kind
    self._utilisation = Utilisation(run_spec.config, kind)

  def run(self) -> learner_events.Leave:
    """Trains until the run is over, the syncer refuses, or `stop`."""
    self.begin()
    began_at = self._step
    while self.goes_on():
      wanted = self._memory is not None and self._memory.wants_others
      if wanted and self._step > began_at:  # Each world makes a step.
        order = host_messages.Reform(REFORM_JOB, self._progress())
        with self._hosts.together(order):
          self._state.perform(order)
        raise Reformed
      self._inner_step()
    self._state.end()
    return self.finish()

  def _inner_step(self):
    global_step = self._client.global_step
    progress = self._run_spec.progress(global_step, self._rows // self._batch)
    self._tape.progress(progress)
    lr = self._schedule(progress)
    said = self._progress() if self._memory is not None else ''
    metrics = self._do(host_messages.MakeStep(self._rows, lr, said))
    self.after_step(
      metrics, self._batch, self._tokens_per_step, global_step, lr
    )

  def _scalars(self, step_s: float) -> dict[str, float]:
    return self._utilisation.scalars(step_s)
