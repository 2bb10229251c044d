# SPDX-License-Identifier: Apache-2.0
"""Compiles the exchange of a scale on its mesh; prints what it takes, as JSON.

Run by `test_sync_path.py` in a process of its own, with as many forced devices
as the slice has chips. Arguments: scale, slice, then keys such as mesh.fsdp=2.
"""

import dataclasses
import json
import math
import re
import sys

from diloco.config import hardware, run_config
from diloco.learner.programs import LearnerPrograms
from diloco.run.spec import make_run_spec
from diloco.sizing import estimate
from experiments import recipe

# Such as pred[8], bf16[4,2], f8e4m3fn[2].
ARRAY = re.compile(r'\b(?:pred|[bsuf]+(\d+)\w*)\[(\d[\d,]*)\]')


class Exchange(LearnerPrograms):
  """All programs but the step, which takes minutes to compile."""

  def _compile_step(self, name, step, *more, **options):
    pass


def main(scale: str, name: str, *keys: str):
  config = recipe.get_config(f'scale={scale}')
  config.data.path = 'unread'
  for key in keys:
    section, _, rest = key.partition('.')
    field, _, value = rest.partition('=')
    config[section][field] = int(value)
  run_spec = make_run_spec(run_config.build(config), reads_text=False)
  of = hardware.topology(name)
  programs = Exchange(run_spec, estimate.described(of, 'cpu').devices)
  hosts = tuple(i // of.chips_per_host for i in range(of.chips))
  partition = dataclasses.replace(programs.partition, hosts=hosts)
  ahead = run_spec.config.protocol.inflight_max
  share = estimate.host_share(run_spec, partition, programs.state_like)
  print(
    json.dumps(
      {
        'parameters': run_spec.parameters,
        'on_every_host': sum(
          math.prod(like.shape)
          for like in programs.params_like.values()
          if like.sharding.is_fully_replicated
        ),
        'largest_shard': max(
          map(estimate.shard_bytes, programs.params_like.values())
        ),
        'programs': {
          name: largest_array(program)
          for name, program in programs.compiled.items()
          if name.partition(' ')[0] in estimate.EXCHANGING
        },
        'fragment_shards': [
          sum(
            math.prod(place.shard_shape(piece.shape)) * 4
            for piece, place in placed(programs, p)
          )
          for p in range(len(run_spec.layout.fragments))
        ],
        'ahead': ahead,
        **estimate.exchange_memory(programs.compiled, ahead),
        'hosts': share.hosts,
        'values': share.values,
        'state_bytes': share.state_bytes,
        'value_bytes': share.value_bytes,
        'held_by_hosts': held_by_hosts(programs, of.chips_per_host),
      }
    )
  )


def largest_array(program) -> int:
  """Bytes of the largest array that a program has on one device, anywhere.

  Of the text of what was compiled for one device of many: arguments, results,
  and all between them, whether or not they ever have memory of their own.
  """
  return max(
    math.ceil(int(bits or 8) * math.prod(map(int, shape.split(','))) / 8)
    for bits, shape in ARRAY.findall(program.as_text())
  )


def placed(programs: LearnerPrograms, fragment: int):
  """Pieces of a fragment with their shardings."""
  pieces = programs._run_spec.layout.fragments[fragment]
  return [(each, programs._places[fragment][each.name]) for each in pieces]


def held_by_hosts(programs: LearnerPrograms, per_host: int) -> list[int]:
  """Values of the different shards of all pieces, by host: out of jax alone."""
  counts = [0] * (programs._mesh.size // per_host)
  order = {each: i for i, each in enumerate(programs._mesh.devices.flat)}
  for p in range(len(programs._places)):
    for piece, place in placed(programs, p):
      held = [set() for _ in counts]
      for each, index in place.devices_indices_map(piece.shape).items():
        ranges = tuple(s.indices(n)[:2] for s, n in zip(index, piece.shape))
        held[order[each] // per_host].add(ranges)
      size = math.prod(place.shard_shape(piece.shape))
      for host, shards in enumerate(held):
        counts[host] += size * len(shards)
  return counts


if __name__ == '__main__':
  main(*sys.argv[1:])
