# SPDX-License-Identifier: Apache-2.0
"""The files of the repository, as git lists them."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[2]


def tracked(*patterns: str) -> list[str]:
  """Returns paths below ROOT: committed ones and new ones, none ignored."""
  listed = subprocess.run(
    ['git', 'ls-files', '-co', '--exclude-standard', *patterns],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  return [name for name in listed.stdout.split() if (ROOT / name).exists()]
