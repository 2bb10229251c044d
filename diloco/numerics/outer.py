# SPDX-License-Identifier: Apache-2.0
"""The outer step: how a merged outer gradient moves a fragment of Θ.

The syncer sends the learners its *outer update* u, quantised. It applies to its
own Θ what the learners will decode, and keeps the rounding error for the next
round (error feedback). So the global model Θ is by definition what learners
reconstruct from the quantised updates:

    u         = OuterOpt(Δ)                        (Alg. 2, line 13)
    bytes     = Q(u + residual)
    residual' = (u + residual) - Q⁻¹(bytes)
    Θ'        = Θ + Q⁻¹(bytes)

Both sides compute the last line by the same code, with numpy: a product and a
sum, each rounded. A fused multiply-add on one side would break every CRC.
OuterOpt, by name in `optimizers.OUTER`, is computed with numpy too: a syncer
that restarts on another CPU, or a replay there, must get the same bits, and XLA
contracts a product and a sum that it compiles together, on CPUs that can.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from diloco.numerics import native, payload
from diloco.numerics.codec import BlockCodec, Codec
from diloco.numerics.fragments import Pieces

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array of its shape.


@dataclasses.dataclass(frozen=True)
class FragmentState:
  """The syncer's state of one fragment; all of it goes into a checkpoint."""

  theta: Arrays  # Θ_p
  optimizer_state: Any  # Opaque state of the optax transformation.
  residual: Arrays  # The part of u + residual that the last round did not send.
  version: int  # Number of closes so far.


@dataclasses.dataclass(frozen=True)
class Anneal:
  """Schedule of η and μ: from 1 and 0 at the start, to `final_lr` and 0 at the
  end, each linearly.

  At the start losses fall fast, and η = 1 without momentum is the learners'
  mean. A momentum that was right for long rounds at a high inner learning rate
  overshoots once that rate has fallen.

  Attributes:
    begin: number of rounds of a fragment after which the end begins.
    end: number of rounds of a fragment after which it is over.
    final_lr: η from then on.
    warmup: number of rounds of a fragment until η and μ are reached; 0: they
      are there from the first one on.
  """

  begin: float
  end: float
  final_lr: float
  warmup: float = 0.0

  def share(self, rounds: int) -> float:
    """Returns the share of the end that is over: 0 before it begins."""
    if rounds <= self.begin:
      return 0.0
    return min((rounds - self.begin) / (self.end - self.begin), 1.0)

  def at(self, rounds: int, lr: float, momentum: float) -> tuple[float, float]:
    """Returns η and μ after so many rounds, of those between both ends."""
    if rounds < self.warmup:
      share = rounds / self.warmup
      return 1.0 + share * (lr - 1.0), share * momentum
    share = self.share(rounds)
    return lr + share * (self.final_lr - lr), momentum * (1.0 - share)


class _Annealed(NamedTuple):
  """The state of SGD with scheduled η and μ."""

  rounds: np.ndarray  # Rounds of the fragment so far; int32 [].
  sgd: Any  # Optax's state.


class _Sgd(optax.GradientTransformation):
  """SGD with momentum, which `step` can do in one pass with what it sends.

  Attributes:
    at: returns a state's factors and momentum b, None if there is none.
    then: returns the state after one, given the next b.
  """

  def __new__(cls, init, update, at, then):
    self = super().__new__(cls, init, update)
    self.at, self.then = at, then
    return self


def make_outer(
  lr: float,
  momentum: float,
  nesterov: bool = True,
  anneal: Anneal | None = None,
) -> optax.GradientTransformation:
  """SGD with Nesterov momentum: b' = μ·b + Δ, u = -η·(Δ + μ·b').

  Its state is that of `optax.sgd`, and so are its bits.
  """
  traced = momentum if anneal else momentum or None
  sgd = optax.sgd(lr, traced, nesterov)

  def start(params):
    state = sgd.init(params)
    return _Annealed(np.zeros((), np.int32), state) if anneal else state

  def at(state):
    # Not `inject_hyperparams`: it makes jax arrays of η and μ, and so of all
    # products with them.
    to, trace = (lr, momentum), (state.sgd if anneal else state)[0]
    if anneal:
      to = anneal.at(int(state.rounds), lr, momentum)
    return native.Sgd(*to, nesterov), getattr(trace, 'trace', None)

  def then(state, trace):
    after = optax.TraceState(trace), *(state.sgd if anneal else state)[1:]
    return _Annealed(_next(state.rounds), after) if anneal else after

  def update(updates, state, params=None):
    del params
    factors, trace = at(state)
    lr, momentum = np.float32(-factors.lr), np.float32(factors.momentum)
    if trace is None:
      return jax.tree.map(lambda delta: lr * delta, updates), state
    trace = jax.tree.map(lambda delta, b: momentum * b + delta, updates, trace)
    wanted = trace
    if nesterov:
      wanted = jax.tree.map(
        lambda delta, b: momentum * b + delta, updates, trace
      )
    return jax.tree.map(lambda x: lr * x, wanted), then(state, trace)

  return _Sgd(start, update, at, then)


def _next(rounds: np.ndarray) -> np.ndarray:
  return np.asarray(rounds + np.int32(1))


VANISHING = 2.0**-54  # 1 minus this, or less, is 1.


class _AdamState(NamedTuple):
  """The state of Adam."""

  rounds: np.ndarray  # Rounds of the fragment so far; int32 [].
  mean: Arrays  # m
  square: Arrays  # v


def make_adam(
  lr: float, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
  """Adam: u = -η·m̂ / (√v̂ + ε) with m̂ = m' / (1 - b1ⁿ), v̂ = v' / (1 - b2ⁿ).

  m' = b1·m + (1 - b1)·Δ, v' = b2·v + (1 - b2)·Δ². Optax has XLA compute bⁿ, and
  CPUs differ in the last bit of its powers. Here bⁿ is made of bⁿ⁻¹.
  """

  powers = {}  # By b: n and bⁿ of the round before.

  def bias(b, rounds):
    """Returns 1 - bⁿ."""
    n, power = powers.get(b, (0, 1.0))
    if n > rounds:
      n, power = 0, 1.0
    while n < rounds and power > VANISHING:
      n, power = n + 1, power * b
    powers[b] = n, power
    return 1 - power

  def start(params):
    zeros = jax.tree.map(np.zeros_like, params)
    return _AdamState(np.zeros((), np.int32), zeros, zeros)

  def update(updates, state, params=None):
    del params
    rounds = _next(state.rounds)

    def moment(b, old, new):
      return np.float32(b) * old + np.float32(1 - b) * new

    def unbiased(b, x):
      return x / np.float32(bias(b, int(rounds)))

    def move(m, v):
      root = np.sqrt(unbiased(b2, v)) + np.float32(eps)
      return np.float32(-lr) * unbiased(b1, m) / root

    mean = jax.tree.map(lambda m, x: moment(b1, m, x), state.mean, updates)
    square = jax.tree.map(
      lambda v, x: moment(b2, v, x * x), state.square, updates
    )
    moved = jax.tree.map(move, mean, square)
    return moved, _AdamState(rounds, mean, square)

  return optax.GradientTransformation(start, update)


def init(
  theta: Arrays, optimizer: optax.GradientTransformation
) -> FragmentState:
  """Returns the state before the first round; `theta` is copied."""
  theta = {name: np.array(v, np.float32) for name, v in theta.items()}
  residual = {name: np.zeros_like(v) for name, v in theta.items()}
  state = jax.tree.map(np.asarray, optimizer.init(theta))
  return FragmentState(theta, state, residual, version=0)


def step(
  state: FragmentState,
  delta: Arrays,
  optimizer: optax.GradientTransformation,
  codec: Codec,
  pieces: Pieces,
  error_feedback: bool = True,
) -> tuple[FragmentState, np.ndarray]:
  """Performs one round of one fragment.

  Args:
    state: the state before; it is not changed.
    delta: Δ, the merged outer gradient, old minus new parameters.
    optimizer: of `optimizers.OUTER`, or any other optax transformation; of a
      run, one that passes `check_outer`.
    codec: codec of the bytes that the learners receive.
    pieces: the pieces of the fragment; one with role 'averaged' bypasses
      OuterOpt: its u is -Δ, so that its Θ is the learners' mean.
    error_feedback: True sends the rounding error with the next round.

  Returns:
    The next state, and the bytes from which `rebuild` gets the same theta.

  Raises:
    ValueError: the outer update is not finite; the round must not close.
  """
  if (
    isinstance(optimizer, _Sgd)
    and isinstance(codec, BlockCodec)
    and error_feedback
    and all(piece.role != 'averaged' for piece in pieces)
  ):
    done = _sgd_send(delta, state, optimizer, codec, pieces)
    if done is not None:
      return done
  update, optimizer_state = _optimize(
    optimizer, dict(delta), state.optimizer_state, dict(state.theta)
  )
  plain = {p.name: -delta[p.name] for p in pieces if p.role == 'averaged'}
  wanted = add(_host(update) | plain, state.residual)
  for name, array in wanted.items():
    if not payload.is_finite({name: array}):
      raise ValueError(f'the outer update of {name} is not finite')
  data = payload.encode(wanted, pieces, codec)
  sent = payload.decode(data, pieces, codec)
  residual = state.residual
  if error_feedback:
    residual = {
      name: np.subtract(wanted[name], x, out=np.empty_like(x))
      for name, x in sent.items()
    }
  theta = add(state.theta, sent)  # As in `rebuild`.
  version = state.version + 1
  return FragmentState(theta, optimizer_state, residual, version), data


def check_outer(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Checks an outer optimizer of the user's own on small arrays.

  Returns:
    The optimizer.

  Raises:
    ValueError: it is no transformation of numpy arrays, its updates or its
      state have another shape than they should, or its first update does not
      go against Δ.
  """
  if not (hasattr(optimizer, 'init') and hasattr(optimizer, 'update')):
    raise ValueError(
      f'gave a {type(optimizer).__name__}, must give an '
      'optax.GradientTransformation'
    )
  theta = {'matrix': np.ones((3, 2), np.float32)}
  theta['number'] = np.array(2, np.float32)
  delta = {name: np.asarray(0.5 * x, np.float32) for name, x in theta.items()}
  optimizer.update({}, optimizer.init({}), {})  # Of a shard without a piece.
  state = first = optimizer.init(theta)
  for rounds in range(2):
    given = {name: x.copy() for name, x in delta.items()}
    update, state = optimizer.update(given, state, theta)
    for what, found, like in (
      ('update', update, delta),
      ('state', state, first),
    ):
      _check_like(what, found, like)
    along = sum(float(np.sum(update[x] * delta[x])) for x in delta)
    if not rounds and not along <= 0:
      raise ValueError(
        f'its first update goes along Δ (their product is {along:.3g}): Δ is a '
        'gradient, Θ moves by adding the update, such as -lr·Δ'
      )
  return optimizer


def _check_like(what: str, found, like):
  leaves = jax.tree.leaves(found)
  on_host = np.ndarray | np.generic
  if strange := [x for x in leaves if not isinstance(x, on_host)]:
    raise ValueError(
      f'its {what} has a {type(strange[0]).__name__}, must have numpy arrays '
      'alone: XLA has other bits on other CPUs'
    )
  kinds = [
    jax.tree.map(lambda x: (str(x.dtype), x.shape), tree)
    for tree in (found, like)
  ]
  if kinds[0] != kinds[1]:
    raise ValueError(f'its {what} is {kinds[0]}, must be {kinds[1]}')


def rebuild(
  theta: Arrays, data: np.ndarray, codec: Codec, pieces: Pieces
) -> dict[str, np.ndarray]:
  """Performs the learner's side of `step`: Θ at the next version, to the bit.

  Raises:
    ValueError: `data` has the wrong length.
  """
  return add(theta, payload.decode(data, pieces, codec))


def add(theta: Arrays, sent: Arrays) -> dict[str, np.ndarray]:
  """Θ + Q⁻¹(bytes), by name; the one sum that both sides compute."""
  return {
    name: np.add(theta[name], x, out=np.empty_like(x))
    for name, x in sent.items()
  }


def _sgd_send(
  delta: Arrays,
  state: FragmentState,
  optimizer: _Sgd,
  codec: BlockCodec,
  pieces: Pieces,
) -> tuple[FragmentState, np.ndarray] | None:
  """Does a whole `step` in one pass over memory; None: it was not done."""
  factors, trace = optimizer.at(state.optimizer_state)
  if trace is None:
    return None
  data = np.empty(payload.payload_bytes(pieces, codec), np.uint8)
  traces, residual, theta, start = {}, {}, {}, 0
  for piece in pieces:
    name, stop = piece.name, start + codec.nbytes(piece.size)
    arrays = delta[name], trace[name], state.residual[name], state.theta[name]
    if arrays[0].shape != piece.shape:
      return None
    sent = native.sgd_send(codec, factors, arrays, data[start:stop])
    if sent is None:
      return None
    traces[name], residual[name], theta[name] = sent
    start = stop
  after = optimizer.then(state.optimizer_state, traces)
  return FragmentState(theta, after, residual, state.version + 1), data


def _optimize(optimizer, delta, optimizer_state, theta):
  """u = OuterOpt(Δ) on numpy arrays; jax code in it is not compiled."""
  on_host = functools.partial(jax.tree.map, np.asarray)
  with jax.disable_jit():
    update, state = optimizer.update(
      on_host(delta), on_host(optimizer_state), on_host(theta)
    )
  return on_host(update), on_host(state)


def _host(arrays) -> dict[str, np.ndarray]:
  return {name: np.asarray(v, np.float32) for name, v in arrays.items()}
