# SPDX-License-Identifier: Apache-2.0
"""Random scenarios of failures against the protocol's invariants.

python -m diloco.swarm --seeds=0:1000
python -m diloco.swarm --seed=17
"""

import time

from absl import app, flags

from diloco.sim import swarm

_SEEDS = flags.DEFINE_string('seeds', '0:1000', 'first:last, without the last.')
_SEED = flags.DEFINE_integer('seed', None, 'Only this one.')


def main(_):
  """Stops at the first seed that fails, and says how to see it again."""
  seeds = _seeds()
  began_s, events = time.monotonic(), 0
  for seed in seeds:
    events += swarm.run(seed)
  took_s = time.monotonic() - began_s
  print(f'{len(seeds)} seeds, {events} events, no violation, {took_s:.1f} s')


def _seeds() -> range:
  if _SEED.value is not None:
    return range(_SEED.value, _SEED.value + 1)
  first, colon, last = _SEEDS.value.partition(':')
  if not (first.isdecimal() and colon and last.isdecimal()):
    raise app.UsageError(f'--seeds={_SEEDS.value}, must be first:last')
  return range(int(first), int(last))


if __name__ == '__main__':
  app.run(main)
