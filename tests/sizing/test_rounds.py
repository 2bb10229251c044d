# SPDX-License-Identifier: Apache-2.0
"""The plan simulates the rounds of unlike learners, and tells their outcome."""

import re
import shlex

import pytest

from diloco.config import run_config, unlike
from diloco.sizing import estimate, rounds
from experiments import recipe
from tests.repository import tree

PAGE = tree.ROOT / 'docs' / 'tpu.md'


def _lines(text: str, arg='learners=4,scale=150m', slice_='v5e-4', **changes):
  given = recipe.get_config(arg)
  given.unlike_learners = text
  given.update_from_flattened_dict(changes)
  if given.data.source == 'text':
    given.data.path = 'unread'
  config = run_config.build(given)
  kinds = unlike.for_each_kind(
    config,
    config.data.shards,
    lambda setup: (setup.config, estimate.slice_of(setup, slice_)),
  )
  of_all = [(ids, *kind) for ids, _, kind in kinds]
  return [*rounds.lines(config, of_all, gbps=10.0, latency_s=0.05)]


def _rows(lines: list[str]) -> list[list[float]]:
  """Figures of each kind: T, tokens/s, of all, steps, rounds, age, merged, …"""
  rows = [line for line in lines if re.match(r'  \d+ of \S+ ', line)]
  cells = [re.sub('[%,]', '', row[20:]).split() for row in rows]
  units = {'M': 1e6, 'B': 1e9}
  for row in cells:
    if row[2] in units:
      row[1:3] = [str(float(row[1]) * units[row[2]])]
  return [[*map(float, row)] for row in cells]


@pytest.fixture
def short(monkeypatch):
  monkeypatch.setattr(rounds, 'LEARNER_STEPS', 1000)


def test_four_times_the_chips_and_the_batch_weigh_sixteen_times(short):
  # Steps of one length, on 4 and on 16 chips: w = c_tokens² / c_steps.
  text = '3: accelerator=v5e-16, mesh.fsdp=16, data.batch=256'
  lines = _lines(text)
  assert max(map(len, lines)) <= 80
  alike, large = _rows(lines)
  assert alike[0] == large[0]
  # 131,072 and 524,288 tokens in T; the step of `plan` itself: 0.499 s.
  assert alike[1:3] == [pytest.approx(3 * 2**17 / 0.499, rel=0.02), 43]
  assert large[1:3] == [pytest.approx(2**19 / 0.499, rel=0.02), 57]
  assert alike[3:5] == large[3:5] == [100, 100]
  assert alike[6] >= 95 and large[6] >= 95
  assert large[7] == pytest.approx(100 * 16 / 19, abs=2)


def test_a_learner_of_slices_is_as_many_and_goes_on_without_one():
  given = recipe.get_config('learners=4,scale=150m')
  given.data.path = 'unread'
  given.unlike_learners = '3: mesh.slices=4, data.batch=256'
  config = run_config.build(given)
  shown, steps_s = [], []
  for i in (0, 3):
    setup = unlike.setups(config, 4)[i]
    slice_ = estimate.slice_of(setup, 'v5e-4')
    kind = (i,), setup.config, slice_
    shown.append([*rounds.failure_lines(config, kind, 10.0, 0.05, pause_s=2.0)])
    assert max(map(len, shown[-1])) <= 80
    data = run_config.with_slices(setup.config, 1).data
    steps_s.append(rounds.step_s(setup.config, slice_))
    assert data.batch == 64
  assert steps_s[0] == steps_s[1] == pytest.approx(0.499, abs=0.001)
  assert [lines[1].split()[1] for lines in shown] == ['wait', 'elastic']
  assert shown[1][0].endswith('in 16 chips; of a learner without 1 of 4')
  assert 'pause of 2 s (as given)' in ' '.join(shown[1])


def test_a_learner_that_is_nine_times_as_fast_leaves_others_behind(short):
  text = '3: accelerator=v5p-16, mesh.fsdp=8, data.batch=32'
  slow, fast = _rows(_lines(text))
  assert slow[0] / fast[0] == pytest.approx(9.32, rel=1e-2)
  assert slow[6] < 70 < fast[6], 'merged'
  slow, fast = _rows(_lines(text, **{'protocol.quorum': 4}))
  assert slow[4] == fast[4] == 100, 'the quorum waits for all'


def test_steps_that_are_too_short_for_the_links_are_said():
  lines = _lines('', 'learners=4', **{'mesh.fsdp': 4})
  assert lines[-1].startswith('  none closes within ') and not _rows(lines)


def test_what_the_page_shows_is_so():
  page = PAGE.read_text()
  (command,) = re.findall(r'^    diloco plan ((?:.*\\\n)*.*)', page, re.M)
  words = dict(
    word.removeprefix('--').split('=', 1)
    for word in shlex.split(command.replace('\\\n', ' '))
  )
  arg = words['config'].removeprefix('experiments/recipe.py:')
  lines = _lines(words['config.unlike_learners'], arg, words['topology'])
  shown = ''.join(f'    {line}\n' for line in lines)
  assert shown in page, f'{PAGE.name} should show\n{shown}'


@pytest.mark.parametrize(
  ('text', 'mesh', 'topology', 'expected'),
  [
    ('', 16, 'H200-16', ('H200-16', 2, 8)),
    ('', 4, 'H100-4', ('H100-4', 1, 4)),
    ('3: gpus_per_host=4', 4, 'H200-8', ('H200-4', 1, 4)),
    ('3: accelerator=gpu, gpus_per_host=8', 8, 'H200-4', ('H200-8', 1, 8)),
    (
      '3: accelerator=gpu, gpus_per_host=8, hosts=2', 16, 'v5e-4',
      ('H100-16', 2, 8),
    ),
    ('3: accelerator=v5p-16', 8, 'H200-8', ('v5p-16', 2, 4)),
  ],
)  # fmt: skip
def test_gpus(text, mesh, topology, expected):
  given = recipe.get_config()
  given.mesh.fsdp = mesh
  given.data.batch = 64
  given.unlike_learners = text
  setup = unlike.setups(run_config.build(given), 4)[3]
  found = estimate.slice_of(setup, topology)
  assert (found.name, found.hosts, found.chips_per_host) == expected
