# SPDX-License-Identifier: Apache-2.0
"""Lists the keys of a configuration: python -m diloco.config [SECTION …]

  python -m diloco.config                     all keys of a run
  python -m diloco.config protocol outer.lr   of sections, or single keys
  python -m diloco.config --study=goodput     of a simulation

A line has a key, its type, its default and its meaning. What a command's own
configuration comes to, COMMAND --config=… --print_config writes.
"""

from absl import flags as absl_flags

from diloco.config import flags, key_list, sections, simulation
from diloco.config.sections import ConfigError

_STUDY = absl_flags.DEFINE_enum(
  'study', None, list(simulation.STUDIES), 'Lists the keys of a simulation.'
)


def main(argv) -> int:
  """Prints the keys that are asked for.

  Raises:
    ConfigError: there is no such section or key.
  """
  study = _STUDY.value
  keys = key_list.of_simulation(study) if study else key_list.of_run()
  asked = argv[1:]
  names = {key.name for key in keys}
  names |= {key.name.partition('.')[0] for key in keys}
  if unknown := [word for word in asked if word not in names]:
    raise ConfigError(
      [f'{w}: no section or key{sections.nearest(w, names)}' for w in unknown]
    )
  rows = [
    (key.name, key.kind, repr(key.default), key.meaning)
    for key in keys
    if not asked or {key.name, key.name.partition('.')[0]} & {*asked}
  ]
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  for name, kind, default, meaning in rows:
    print(f'{name:{widths[0]}}  {kind:{widths[1]}}  {default:14}  {meaning}')
  return 0


if __name__ == '__main__':
  flags.run_without_config(main)
