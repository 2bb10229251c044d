# SPDX-License-Identifier: Apache-2.0
"""Special cases of the whole system against references computed by hand."""

import numpy as np
import pytest

from diloco.numerics.fragments import take
from tests.in_process import lockstep
from tests.in_process.lockstep import Lockstep, toy_config, toy_gradient

OUTER_LR, MOMENTUM = 0.7, 0.9


def _plain(lock, learner, steps):
  """Parameters of plain SGD on one learner's batches."""
  params = {
    k: v.astype(np.float64)
    for k, v in lock.run_spec.initial_parameters().items()
  }
  for i in range(steps):
    tokens = lock.learners[learner].batch(i)['tokens']
    for k, g in toy_gradient(params, tokens).items():
      params[k] = params[k] - lock.run_spec.config.inner.lr * g
  return params


def _assert_same(found, expected):
  for path in expected:
    np.testing.assert_allclose(
      np.asarray(found[path]), expected[path], rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize(
  'fragments,overlap,blend',
  [(1, 0, 'replace'), (2, 0, 'replace'), (2, 2, 'rebase')],
)
def test_one_learner_without_outer_momentum_is_plain_training(
  fragments, overlap, blend
):
  """Also with an overlap, if its progress since the copy is kept."""
  config = toy_config(
    learners=1,
    fragments=fragments,
    sync_every_steps=4,
    overlap_steps=overlap,
    quorum=1,
    blend=blend,
  )
  config.outer.update(lr=1.0, momentum=0.0, anneal_fraction=0.0)
  lock = Lockstep(config, 1, overlap, lockstep.toy_model())
  lock.run(24)
  assert len(lock.published) == 6 * fragments
  _assert_same(lock.learners[0].params, _plain(lock, 0, 24))


def _streaming(lock, steps, overlap):
  """Streaming DiLoCo (arXiv 2501.18512) on the toy model, all in numpy f64.

  Fragment p is merged at steps (r - 1)·P + p + 1 rounds of s; the update is
  applied `overlap` steps later. P = 1 and no overlap is synchronous DiLoCo.
  """
  run_spec = lock.run_spec
  protocol = run_spec.config.protocol
  spacing = protocol.spacing_steps
  pieces = run_spec.layout.fragments
  theta = {
    k: v.astype(np.float64) for k, v in run_spec.initial_parameters().items()
  }
  local = [dict(theta) for _ in lock.learners]
  theta = {k: v.copy() for k, v in theta.items()}
  momentum = {k: np.zeros_like(v) for k, v in theta.items()}
  due = []
  for step in range(1, steps + 1):
    for m, learner in enumerate(lock.learners):
      tokens = learner.batch(step - 1)['tokens']
      for k, g in toy_gradient(local[m], tokens).items():
        local[m][k] = local[m][k] - run_spec.config.inner.lr * g
    if step % spacing == 0:
      p = (step // spacing - 1) % protocol.fragments
      for piece in pieces[p]:
        at = piece.path, piece.index
        old = theta[at[0]][at[1]]
        mean = np.mean([x[at[0]][at[1]] for x in local], axis=0)
        delta = old - mean
        b = momentum[at[0]][at[1]] * MOMENTUM + delta
        momentum[at[0]][at[1]] = b
        theta[at[0]][at[1]] = old - OUTER_LR * (delta + MOMENTUM * b)
      arrived = {n: x.copy() for n, x in take(theta, pieces[p]).items()}
      due.append((step + overlap, p, arrived))
    for at, p, arrived in due:
      if at == step:
        for m in range(len(local)):
          for piece in pieces[p]:
            array = local[m][piece.path].copy()
            array[piece.index] = arrived[piece.name]
            local[m][piece.path] = array
  return theta, local


@pytest.mark.parametrize('fragments,overlap', [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_all_learners_in_step_are_synchronous_or_streaming_diloco(
  fragments, overlap
):
  config = toy_config(
    learners=3,
    fragments=fragments,
    sync_every_steps=4,
    overlap_steps=overlap,
    quorum=3,
    blend='replace',
  )
  config.outer.update(lr=OUTER_LR, momentum=MOMENTUM, anneal_fraction=0.0)
  lock = Lockstep(config, 3, overlap, lockstep.toy_model())
  lock.run(21)
  assert all(len(p.shares) == 3 for p in lock.published)
  theta, local = _streaming(lock, 21, overlap)
  _assert_same(lock.model.parameters(), theta)
  for m, learner in enumerate(lock.learners):
    _assert_same(learner.params, local[m])


@pytest.mark.parametrize('codec', ['int4', 'bf16'])
def test_learners_and_syncer_hold_the_same_bytes_of_every_version(codec):
  config = toy_config(
    learners=2, fragments=2, sync_every_steps=4, overlap_steps=1, quorum=2
  )
  config.outer.update(lr=OUTER_LR, momentum=MOMENTUM, anneal_fraction=0.0)
  config.codec.update(up=codec, down=codec, block_size=8)
  lock = Lockstep(config, 2, 1, lockstep.toy_model())
  compared = 0
  for _ in range(60):
    lock.run(1)
    for p in lock.fragments:
      version, data, _ = lock.model.fragment(p)
      for learner in lock.learners:
        held, theta = learner.host.fragment(p)
        if held == version:
          pieces = lock.run_spec.layout.fragments[p]
          assert b''.join(theta[x.name].tobytes() for x in pieces) == (
            data.tobytes()
          )
          compared += 1
  assert lock.published[-1].version >= 14
  assert compared > 100


def test_error_feedback_brings_int4_where_f32_goes():
  """Both legs int4: Θ stays within a small share of the way that f32 went."""

  def end(codec):
    config = toy_config(
      learners=2, fragments=2, sync_every_steps=4, overlap_steps=1, quorum=2
    )
    config.outer.update(lr=OUTER_LR, momentum=0.5, anneal_fraction=0.0)
    config.codec.update(up=codec, down=codec, block_size=8)
    lock = Lockstep(config, 2, 1, lockstep.toy_model())
    start = lock.model.parameters()
    lock.run(80)
    return start, lock.model.parameters()

  start, exact = end('f32')
  _, coarse = end('int4')
  way = np.linalg.norm(exact['layers/w'] - start['layers/w'])
  off = np.linalg.norm(exact['layers/w'] - coarse['layers/w'])
  assert off < 0.1 * way, f'{off=} {way=}'
