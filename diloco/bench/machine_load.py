# SPDX-License-Identifier: Apache-2.0
"""Describes the machine of a benchmark, and how busy others keep it."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess

STAT = pathlib.Path('/proc/stat')
CPUINFO = pathlib.Path('/proc/cpuinfo')
MEMINFO = pathlib.Path('/proc/meminfo')
ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ('jax', 'jaxlib', 'numpy', 'optax', 'grpcio', 'orbax-checkpoint')
IDLE = (3, 4)  # Fields of a line of /proc/stat: idle, waiting for a disk.
GUEST = 8  # From here on, fields repeat what others hold.
BUSY_SHARE = 0.05  # Of all cores; from here on the table warns.


def describe() -> dict:
  """Returns processor, cores, memory, versions, and the commit if known."""
  return {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'cpu': _field(CPUINFO, 'model name') or platform.processor(),
    'cores': os.cpu_count(),
    'cores_allowed': _cores_allowed(),
    'memory_bytes': _memory_bytes(),
    'system': platform.platform(),
    'python': platform.python_version(),
    'diloco': _version('diloco'),
    'commit': _commit(),
    'versions': {name: _version(name) for name in PACKAGES},
  }


# CPU seconds so far: of the machine, idle ones among them, and of this process
# and its dead children.
CpuTimes = tuple[float, float, float]


class LoadMeter:
  """Measures which share of the machine's CPU time others used.

  Children count as its own once they have been waited for.
  """

  def __init__(self):
    self._begin = read_times()

  def others(self) -> float | None:
    """Returns the others' share since the start, in [0, 1]; None: unknown."""
    return share_of_others(self._begin, read_times())


def share_of_others(
  begin: CpuTimes | None, end: CpuTimes | None
) -> float | None:
  """Returns (busy − own) / total between two readings; None: unknown."""
  if begin is None or end is None or end[0] <= begin[0]:
    return None
  total_s, idle_s, own_s = (b - a for a, b in zip(begin, end))
  return min(max((total_s - idle_s - own_s) / total_s, 0.0), 1.0)


def read_times() -> CpuTimes | None:
  """Reads /proc/stat; None where there is none."""
  try:
    line = STAT.read_text().split('\n', 1)[0]
  except OSError:
    return None
  tick_s = 1 / os.sysconf('SC_CLK_TCK')
  fields = [int(field) * tick_s for field in line.split()[1:]][:GUEST]
  used = os.times()
  return sum(fields), sum(fields[i] for i in IDLE), sum(used[:4])


def said(share: float | None) -> str:
  """Returns the sentence on the others' share."""
  if share is None:
    return 'How busy the machine was is not known: it has no /proc/stat.'
  warning = (
    ' Figures of time are not those of a quiet machine.'
    if share > BUSY_SHARE
    else ''
  )
  return (
    f'Other processes used {share:.0%} of the CPU time of all cores during '
    f'the run.{warning}'
  )


def _field(path: pathlib.Path, name: str) -> str:
  try:
    text = path.read_text()
  except OSError:
    return ''
  found = re.search(rf'^{name}\s*:\s*(.*)$', text, re.MULTILINE)
  return found[1] if found else ''


def _memory_bytes() -> int | None:
  kib = _field(MEMINFO, 'MemTotal').partition(' ')[0]
  return 1024 * int(kib) if kib.isdecimal() else None


def _cores_allowed() -> int | None:
  if not hasattr(os, 'sched_getaffinity'):
    return os.cpu_count()
  return len(os.sched_getaffinity(0))


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _commit() -> str | None:
  """Returns the commit of a checkout, with a + if files differ from it."""
  if not (ROOT / '.git').exists():
    return None
  commit = _git('rev-parse', 'HEAD')
  changed = _git('status', '--porcelain', '--untracked-files=no')
  return f'{commit}+' if commit and changed else commit


def _git(*words: str) -> str | None:
  try:
    done = subprocess.run(
      ['git', *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()
