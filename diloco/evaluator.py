# SPDX-License-Identifier: Apache-2.0
"""Evaluates Θ periodically while a run goes on: python -m diloco.evaluator …

  python -m diloco.evaluator RUN

Every `run.eval_every_rounds` rounds it takes the syncer's newest checkpoint and
writes validation loss and bits per byte to metrics/evaluator.jsonl and to
TensorBoard. It needs only the folder, and no other process depends on it; the
configuration is that in RUN, unless there is a --config. It uses one thread of
the CPU, at low priority; with --accelerators, the model is spread over those of
this machine, which no learner may use. Exit code 0: the run is over.
"""

import math
import os
import pathlib
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import flags, logging

from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.syncer_records import newest_theta_after
from diloco.config import flags as config_flags
from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.data import text_windows
from diloco.evaluation.final_evaluation import evaluated
from diloco.metrics import names, status
from diloco.metrics.jsonl import CorruptLine, Tail, from_the_end
from diloco.metrics.recorded_run import FollowedRun
from diloco.metrics.workdir import EVALUATOR, Workdir, folder_at
from diloco.metrics.writer import Writer, process_writer
from diloco.monitoring import monitor_flags
from diloco.numerics import fragments
from diloco.run.command import run_command
from diloco.run.environment import THREADS
from diloco.run.heldout import Heldout
from diloco.run.spec import RunSpec, make_run_spec

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_ACCELERATORS = flags.DEFINE_bool(
  'accelerators', False, 'Evaluate on the accelerators of this machine.'
)
LOOK_EVERY_S = 0.5
AGAIN_ROUNDS = 1024  # A restarted syncer may resume this many rounds earlier.
# Metric with the round of Θ, from which a restarted evaluator resumes.
EVALUATED = 'round'
NICE = 10  # Learners on the same cores go first; 19 gets no turn at all.


class ContinuousEvaluator:
  """One run's evaluator.

  Args:
    workdir: the run's folder; only metrics are written to it.
    writer: takes the scalars, by global step.
  """

  def __init__(self, run_spec: RunSpec, workdir: Workdir, writer: Writer):
    self._run_spec = run_spec
    self._workdir = workdir
    self._writer = writer
    shards = range(run_spec.config.syncer.shards)
    self._states = [workdir.states(shard) for shard in shards]
    self._heldout = Heldout(run_spec)
    self._every = max(1, run_spec.config.run.eval_every_rounds)
    done = from_the_end(workdir.metrics(EVALUATOR))
    self._round = next((int(each[EVALUATED]) for each in done), 0)
    self._tape = MergedTokens(workdir.tape, len(run_spec.layout.fragments))

  def run(self):
    """Evaluates until the run is over, and once more after that.

    Where learners trained on the CPU, this process evaluates the final Θ, too:
    it has read and compiled all that another one would have to.
    """
    over = False
    while not over:
      over = self._workdir.summary.exists()
      if not self.look() and not over:
        time.sleep(LOOK_EVERY_S)
    if self._is_on_cpu():
      evaluation = evaluated(self._run_spec, self._workdir)
      status.write_evaluation(self._workdir.evaluation, evaluation)

  def _is_on_cpu(self) -> bool:
    """Returns False as well if no learner tells, as on other machines."""
    if not self._workdir.config.exists():
      return False
    return FollowedRun(self._workdir.root).machine().get('platform') == 'cpu'

  def look(self) -> bool:
    """Evaluates the newest Θ if it is due; returns True if it was.

    Raises:
      ConfigError: Θ belongs to another model.
    """
    due = (self._round // self._every + 1) * self._every
    newest = newest_theta_after(self._states, due - 1)
    if newest is None:
      return False
    began_s = time.monotonic()
    self._round, thetas = newest
    loss = self._heldout.loss(self._parameters(thetas))
    step, tokens = self._tape.at(self._round)
    scalars = {
      names.TIME: time.time(),
      EVALUATED: self._round,
      names.GLOBAL_STEP: step,
      names.MERGED_TOKENS: tokens,
      names.EVAL_LOSS: loss,
      names.EVAL_TIME: time.monotonic() - began_s,
    }
    if self._run_spec.model.logits is not None:
      per_token = text_windows.bytes_per_token(self._run_spec.text.heldout)
      scalars[names.EVAL_BITS] = status.bits(loss) / per_token
    self._writer.write_scalars(step, scalars)
    self._writer.flush()
    logging.info('round %d, step %d: loss %.4f', self._round, step, loss)
    return True

  def _parameters(
    self, thetas: Sequence[Mapping[str, np.ndarray]]
  ) -> dict[str, np.ndarray]:
    params = {
      path: np.empty(spec.shape, np.float32)
      for path, spec in self._run_spec.specs.items()
    }
    for theta, pieces in zip(thetas, self._run_spec.layout.fragments):
      shapes = {piece.name: piece.shape for piece in pieces}
      if {name: x.shape for name, x in theta.items()} != shapes:
        raise ConfigError(
          [
            f'{self._states[0]} holds another model than that of --config;'
            ' is it the config of this run?'
          ]
        )
      params = fragments.put(params, pieces, theta)
    return params


def _log(error: CorruptLine) -> None:
  logging.error('a line is passed over: %s', error)


class MergedTokens:
  """Global step and tokens of each closed round, from the syncer's event log.

  Every token is merged once with each fragment, so P merges count it once. A
  restarted syncer may report a round twice; the later report counts, as far as
  `AGAIN_ROUNDS` back. For older rounds only the sum is kept.
  """

  def __init__(self, tape: pathlib.Path, fragment_count: int):
    self._tail = Tail(tape)
    self._fragments = fragment_count
    self._rounds: dict[int, tuple[int, int]] = {}  # Round -> step, tokens.
    # Last summed round, its step, and the sum of tokens.
    self._summed = (0, 0, 0)

  def at(self, closed_round: int) -> tuple[int, int]:
    """Returns global step and merged tokens up to a round; both never fall."""
    for line in self._tail.new_records(_log):
      if line['kind'] == 'Publish' and line['round'] > self._summed[0]:
        tokens = sum(share['c_tokens'] for share in line['shares'])
        self._rounds[line['round']] = line['step'], tokens
    for r in sorted(
      r for r in self._rounds if r <= closed_round - AGAIN_ROUNDS
    ):
      step, tokens = self._rounds.pop(r)
      _, newest, total = self._summed
      self._summed = r, max(step, newest), total + tokens
    closed = [x for r, x in self._rounds.items() if r <= closed_round]
    step = max((step for step, _ in closed), default=self._summed[1])
    total = self._summed[2] + sum(tokens for _, tokens in closed)
    return step, math.floor(total / self._fragments)


def main(config) -> int:
  """Follows the run to its end."""
  if not _ACCELERATORS.value:
    jax.config.update('jax_platforms', 'cpu')  # Devices are the learners'.
  os.nice(NICE)
  root, folder = pathlib.Path(_WORKDIR.value), config.checkpoint.folder
  workdir = Workdir(root, folder_at(folder))
  with config_flags.refusing():
    monitor = monitor_flags.begin(config.name, EVALUATOR)
    run_spec = make_run_spec(config)
  writer = process_writer(workdir, EVALUATOR, run_config.flat(config), monitor)
  try:
    ContinuousEvaluator(run_spec, workdir, writer).run()
  except BrokenRecord as error:
    raise ConfigError([str(error)]) from None
  finally:
    writer.close()
  return 0


if __name__ == '__main__':
  os.environ[THREADS] = '1'  # Before jax looks for devices.
  run_command(main, role='evaluator', of_run=True)
