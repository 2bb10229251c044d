# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that outlive their process.

The next world of a learner with slices runs the programs of the last one that
had as many. JAX's own cache does not have them: only process 0 writes to it,
and on CPUs a program's key differs by process. Here each host keeps its own, in
the folder in memory that its launcher makes and removes, and traces nothing.
JAX's cache is off in such a process.
"""

import hashlib
import json
import os
import pathlib
import pickle
from collections.abc import Callable, Mapping

import jax
from absl import logging
from jax.experimental import serialize_executable


class KeptPrograms:
  """The programs of one host of a world.

  Args:
    folder: of the learner, in memory; its files are trusted.
    identity: of the learner and run, and of the world: other processes with the
      same one compile the same programs.
  """

  def __init__(self, folder: pathlib.Path, identity: Mapping[str, str]):
    flags = os.environ.get('XLA_FLAGS', '')
    whole = json.dumps([dict(identity), jax.__version__, flags])
    digest = hashlib.sha256(whole.encode()).hexdigest()
    self._folder = folder / f'programs-{digest[:16]}'
    self._folder.mkdir(parents=True, exist_ok=True)
    # A program that XLA has loaded from there can't be kept: on CPUs the kept
    # one lacks functions, which is seen when it is run.
    jax.config.update('jax_enable_compilation_cache', False)

  def get(
    self, name: str, compile_: Callable[[], jax.stages.Compiled]
  ) -> jax.stages.Compiled:
    """Returns a program of an earlier process; else compiles and keeps it."""
    path = self._folder / name.replace(' ', '-')
    if path.exists():
      kept = pickle.loads(path.read_bytes())
      return serialize_executable.deserialize_and_load(*kept)
    compiled = compile_()
    try:
      kept = serialize_executable.serialize(compiled)
    except ValueError as error:  # It has callbacks, or another such part.
      logging.info('%s: will be compiled at each start: %s', name, error)
      return compiled
    new = path.with_name(f'{path.name}.new')
    new.write_bytes(pickle.dumps(kept))
    os.replace(new, path)
    return compiled
