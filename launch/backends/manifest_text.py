# SPDX-License-Identifier: Apache-2.0
"""Objects of Kubernetes as the text that kubectl reads."""

from collections.abc import Sequence

import yaml


class Octal(int):
  """A number that is written as permissions of files are, such as 0440."""


class _Dumper(yaml.SafeDumper):
  """Writes YAML without anchors, and long texts as blocks."""

  def ignore_aliases(self, data) -> bool:
    return True


def _text(dumper: yaml.SafeDumper, text: str):
  style = '|' if '\n' in text else None
  return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


def _octal(dumper: yaml.SafeDumper, number: Octal):
  return dumper.represent_scalar('tag:yaml.org,2002:int', f'0{number:o}')


_Dumper.add_representer(str, _text)
_Dumper.add_representer(Octal, _octal)


def as_yaml(manifests: Sequence[dict]) -> str:
  """Returns one YAML document per manifest, in order."""
  return yaml.dump_all(
    manifests,
    Dumper=_Dumper,
    sort_keys=False,
    explicit_start=True,
    allow_unicode=True,
    width=1000,
  )
