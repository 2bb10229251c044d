# SPDX-License-Identifier: Apache-2.0
"""The token ledger: trained = merged + overwritten + lost + pending, exactly.

Each token that a learner trains on has its progress in every fragment, so each
learner and fragment has a balance of its own. Both sides are used: `merged` is
what the syncer's closed rounds name, all else is what learners did. A merge
that only one side knows of, or knows twice, leaves tokens unexplained.

Positions are counts of a learner's own tokens. A process that resumes from a
checkpoint shares the positions of the one that wrote it up to there.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl, renewed
from diloco.metrics.workdir import Workdir, learner_name
from diloco.protocol.config import blending_of
from diloco.protocol.incarnation import process_of

# Pending as a world of slices ended, after the boundary in their memory.
SLICE = 'slice'
DIED = 'died'  # Pending at a death, and in no checkpoint that was resumed.
LEFT = 'left'  # Pending in a process that left in good order,
QUARANTINED = 'quarantined'  # or that was quarantined.
BOOTSTRAP = 'bootstrap'  # Pending in a checkpoint, and replaced by a newer Θ.
# Pending in a checkpoint, and not separable: 'interpolate'.
RESTORED = 'restored'
LEDGER = 'ledger'  # Merged, and lost with the syncer's disk.

Name = tuple[int, int]  # An offer: number of its process, handle.


@dataclasses.dataclass(frozen=True)
class TokenCounts:
  """Tokens of one learner and fragment, or sums of these."""

  trained: int
  merged: int
  overwritten: int
  lost: tuple[tuple[str, int], ...]  # By reason, ascending; none is 0.
  pending: int  # In θ, and still to be merged.

  @property
  def unexplained(self) -> int:
    """Positive: lost without a reason. Negative: counted twice."""
    lost = sum(tokens for _, tokens in self.lost)
    return self.trained - self.merged - self.overwritten - lost - self.pending


@dataclasses.dataclass
class Process:
  """The tokens of one process of a learner; lists are by fragment."""

  first: int  # Position at which it began,
  first_counts: tuple[int, ...]  # and from which its θ_p had progress then.
  last: int  # Position now, or at its end.
  counts: list[int]  # From which θ_p has unsettled progress.
  overwritten: list[int]  # As reported.
  bootstrap: list[int]  # As reported, before its first step.
  offers: dict[tuple[int, int], int]  # (p, handle) -> position of the copy.
  taken_in: set[tuple[int, int]]  # (p, handle) of merges that it knows of.
  parent: int | None = None  # Number of the one whose state it went on from.
  end: str | None = None  # Reason of its end, if known.


@dataclasses.dataclass(frozen=True)
class MergedContribution:
  """One contribution to a closed round."""

  fragment: int
  version: int  # The resulting version.
  name: Name
  tokens: int


class TokenAccount:
  """One learner's ledger over all its processes."""

  def __init__(self, fragments: int):
    self.processes: dict[int, Process] = {}  # By number, in order.
    self._fragments = fragments
    self._merged: list[list[MergedContribution]] = [
      [] for _ in range(fragments)
    ]
    self._void: list[list[MergedContribution]] = [[] for _ in range(fragments)]

  # What happened --------------------------------------------------------------

  def begin(
    self,
    number: int,
    position: int,
    counts: Sequence[int],
    parent: int | None = None,
  ) -> Process:
    """Notes the start of a process.

    Args:
      position: the learner's own tokens, as the process knows them.
      counts: by fragment, the position from which θ_p has progress.
      parent: number of the process whose state it goes on from; None: unknown,
        or none's.
    """
    zeros = [0] * self._fragments
    process = Process(
      position, tuple(counts), position, list(counts), [*zeros], [*zeros],
      {}, set(), parent,
    )  # fmt: skip
    self.processes[number] = process
    return process

  def apply(
    self,
    number: int,
    fragment: int,
    *,
    carry: bool,
    handle: int,
    overwritten_tokens: int,
    training: bool,
  ):
    """Notes that a process takes in Θ_p."""
    process = self.processes[number]
    name = fragment, handle
    if handle:
      process.taken_in.add(name)
    if not carry:
      process.counts[fragment] = process.last
    elif name in process.offers:
      process.counts[fragment] = process.offers[name]
    claims = process.overwritten if training else process.bootstrap
    claims[fragment] += overwritten_tokens

  def merge(self, merged: MergedContribution):
    """Notes a merge in a closed round; it voids later versions of before."""
    self._merged[merged.fragment].append(merged)

  def void(self, fragment: int, version: int):
    """Notes that the syncer lost this and later versions of a fragment."""
    kept = self._merged[fragment]
    self._void[fragment] += [x for x in kept if x.version >= version]
    self._merged[fragment] = [x for x in kept if x.version < version]

  # What comes of it -----------------------------------------------------------

  def row(self, fragment: int) -> TokenCounts:
    """Returns the balance of one fragment."""
    return _Balance(
      fragment,
      list(self.processes.items()),
      self._merged[fragment],
      self._void[fragment],
    ).row()


@dataclasses.dataclass(frozen=True)
class _Unheard:
  """Positions [low, high) of a process, merged without its knowledge."""

  number: int  # Of the process.
  low: int
  high: int


def _aside(number: int, later: Sequence[tuple[int, Process]]) -> int:
  """Returns how many processes lie between one and the next that goes on with
  its state.

  As where a slice comes back whose memory is further than what the others had
  to begin again with meanwhile. 0 where they all go on from there, or back.
  """
  for i, (_, process) in enumerate(later):
    if process.parent == number and process.first > later[0][1].first:
      return i
  return 0


class _Balance:
  """The balance of one fragment of one learner, computed process by process."""

  def __init__(
    self,
    fragment: int,
    processes: Sequence[tuple[int, Process]],
    merged: Sequence[MergedContribution],
    void: Sequence[MergedContribution],
  ):
    self._p = fragment
    self._processes = processes
    self._merged = merged
    self._void = void
    self._overwritten = 0
    self._lost: collections.Counter[str] = collections.Counter()
    # Merged, but not taken in by the process that offered it.
    self._unheard: list[_Unheard] = []

  def row(self) -> TokenCounts:
    pending = 0
    if self._processes:
      settled = self._settled_by(self._processes, 0)
      number, last = self._processes[-1]
      self._close(number, last, settled, last.last)
      pending = last.last - settled
      pending -= sum(gap.high - gap.low for gap in self._unheard)
      if last.end is not None:
        self._lost[last.end] += pending
        pending = 0
    self._lose_void()
    return TokenCounts(
      sum(x.last - x.first for _, x in self._processes),
      sum(x.tokens for x in self._merged),
      self._overwritten,
      tuple(sorted((k, n) for k, n in self._lost.items() if n)),
      pending,
    )

  def _settled_by(
    self, processes: Sequence[tuple[int, Process]], settled: int
  ) -> int:
    """Returns the position up to which all is merged, overwritten or lost, as
    the last of some processes ends.
    """
    while True:
      (number, process), *later = processes
      settled = self._settled_in(number, process, settled)
      if not later:
        return settled
      aside = _aside(number, later)
      if aside:
        settled = self._settle_aside(later[:aside], settled)
      processes = later[aside:]
      cut = processes[0][1].first
      self._lost[process.end or DIED] += self._close(
        number, process, settled, cut
      )
      settled = min(settled, cut)

  def _settled_in(self, number: int, process: Process, settled: int) -> int:
    p = self._p
    self._overwritten += process.overwritten[p]
    self._lost[BOOTSTRAP] += process.bootstrap[p]
    settled = max(settled, self._skip(settled, process.first_counts[p]))
    self._unheard += self._unheard_of(number, process)
    # Progress settled by an earlier process is claimed twice.
    first, now = process.first_counts[p], process.counts[p]
    again = max(0, min(settled, now) - first)
    self._take_back(again, bool(process.bootstrap[p]))
    return max(settled, now)

  def _settle_aside(
    self, processes: Sequence[tuple[int, Process]], settled: int
  ) -> int:
    """Settles processes with whose state none goes on.

    Returns:
      The new `settled`: of what they had in common with the one before them,
      they may have settled more.
    """
    branch, unheard = processes[0][1].first, self._unheard
    self._unheard = [
      dataclasses.replace(gap, high=min(gap.high, branch))
      for gap in unheard
      if gap.low < branch
    ]
    theirs = self._settled_by(processes, min(settled, branch))
    number, last = processes[-1]
    self._lost[last.end or DIED] += self._close(number, last, theirs, branch)
    self._unheard = unheard
    return max(settled, min(theirs, branch))

  def _unheard_of(self, number: int, process: Process) -> list['_Unheard']:
    """Returns the merges of the process that it has not heard of."""
    tokens = {x.name[1]: x.tokens for x in self._merged if x.name[0] == number}
    unheard = []
    for handle, many in tokens.items():
      name = self._p, handle
      if name in process.offers and name not in process.taken_in:
        high = process.offers[name]
        unheard.append(_Unheard(number, high - many, high))
    return unheard

  def _skip(self, settled: int, first: int) -> int:
    """Loses what a checkpoint had pending and its process does not count.

    Args:
      settled: position up to which all is merged, overwritten or lost.
      first: position from which the process counts.

    Returns:
      `first`.
    """
    if first > settled:
      merged = (
        max(0, min(gap.high, first) - max(gap.low, settled))
        for gap in self._unheard
      )
      self._lost[RESTORED] += first - settled - sum(merged)
      self._unheard = [x for x in self._unheard if x.high > first]
    return first

  def _take_back(self, tokens: int, bootstrap: bool):
    """Subtracts tokens from a claim that are in another sum already."""
    if bootstrap:
      self._lost[BOOTSTRAP] -= tokens
    else:
      self._overwritten -= tokens

  def _close(
    self, number: int, process: Process, settled: int, cut: int
  ) -> int:
    """Computes what is lost at the end of a process, minus unheard merges.

    Args:
      settled: position up to which all is merged, overwritten or lost.
      cut: position from which the next process continues.

    Returns:
      Tokens beyond both that no round has merged.
    """
    begin = max(settled, cut)
    left, rest = max(0, process.last - begin), []
    for gap in self._unheard:
      before = gap.number != number and bool(process.bootstrap[self._p])
      self._take_back(max(0, min(gap.high, settled) - gap.low), before)
      left -= max(0, gap.high - max(gap.low, begin))
      low, high = max(gap.low, settled), min(gap.high, cut)
      if low < high:
        rest.append(_Unheard(gap.number, low, high))
    self._unheard = rest
    return left

  def _lose_void(self):
    """Counts merges that learners knew of, and the syncer no longer does."""
    kept = {x.name for x in self._merged}
    processes = dict(self._processes)
    for offer in {x.name: x for x in self._void}.values():
      number, handle = offer.name
      process = processes.get(number)
      if process is None or offer.name in kept:
        continue
      if (self._p, handle) in process.taken_in:
        self._lost[LEDGER] += offer.tokens


def unexplained(rows: Iterable[TokenCounts]) -> int:
  """Returns the sum of all deviations, which do not cancel each other."""
  return sum(abs(row.unexplained) for row in rows)


def text(row: TokenCounts) -> str:
  """Returns a line of text: what was trained, and where it went."""
  return f'{row.trained:,} trained, once per fragment: {shares(row)}'


def shares(row: TokenCounts) -> str:
  """Returns the shares of what was trained, lost ones by reason."""
  whole = max(row.trained, 1)
  parts = [
    f'{row.merged / whole:.1%} merged',
    f'{row.overwritten / whole:.1%} overwritten',
    *(f'{tokens / whole:.1%} lost ({why})' for why, tokens in row.lost),
    f'{row.pending / whole:.1%} pending',
  ]
  return ', '.join(parts)


def total(rows: Iterable[TokenCounts]) -> TokenCounts:
  """Returns the sums over all rows."""
  rows = list(rows)
  lost = collections.Counter()
  for row in rows:
    lost.update(dict(row.lost))
  return TokenCounts(
    sum(row.trained for row in rows),
    sum(row.merged for row in rows),
    sum(row.overwritten for row in rows),
    tuple(sorted(lost.items())),
    sum(row.pending for row in rows),
  )


# The ledger of a run of processes, from its event logs
# ----------------------------

Lines = Sequence[Mapping]  # Raw lines of an event log.
Rows = dict[tuple[int, int], TokenCounts]  # By learner and fragment.


def rows(
  syncer: Lines,
  learners: Mapping[int, Lines],
  known: Mapping[int, Iterable[tuple[int, int]]],
  fragments: int,
  blend: str = 'rebase',
) -> Rows:
  """Returns the balance of each learner and fragment.

  Steps that a killed process had not written down are not known to have been
  trained. What the last process of a learner has pending is lost only if the
  run has ended without it: otherwise a restart may resume it.

  Args:
    known: by learner id, (incarnation, own tokens) from the metrics.
    blend: the run's blend; with 'interpolate' a process counts anew after a
      checkpoint.
  """
  reader = _Reader(syncer, fragments, blending_of(blend).interpolates)
  ids = {*learners, *(m for _, _, m, _ in _shares(syncer))}
  return {
    (m, p): account.row(p)
    for m in sorted(ids)
    for account in [reader.account(m, learners.get(m, ()), known.get(m, ()))]
    for p in range(fragments)
  }


def rows_of(workdir: Workdir, fragments: int, blend: str = 'rebase') -> Rows:
  """Returns the balances of the run in `workdir`.

  Raises:
    CorruptLine: a file is not what a run writes.
  """
  ids = [
    int(path.stem.rpartition('-')[2])
    for path in sorted(workdir.tapes.glob('learner-*.jsonl'))
  ]
  data = workdir.data
  return rows(
    read_jsonl(workdir.tape),
    {
      m: [renewed(x, data) for x in read_jsonl(workdir.learner_tape(m))]
      for m in ids
    },
    {
      m: [
        (int(line[names.INCARNATION]), line[names.TOKENS])
        for line in read_jsonl(workdir.metrics(learner_name(m)))
        if names.TOKENS in line
      ]
      for m in ids
    },
    fragments,
    blend,
  )


def _shares(syncer: Lines):
  """Returns (p, version, learner, share) of all closes, in order."""
  return [
    (line['fragment'], line['version'], share['learner'], share)
    for line in syncer
    if line['kind'] == 'Publish'
    for share in line['shares']
  ]


class _Reader:
  """Fills accounts from tapes."""

  def __init__(self, syncer: Lines, fragments: int, anew: bool):
    self._anew = anew
    self._syncer = syncer
    self._fragments = fragments
    self._over = any(line['kind'] == 'End' for line in syncer)

  def account(
    self, learner: int, lines: Lines, known: Iterable[tuple[int, int]]
  ) -> TokenAccount:
    account = TokenAccount(self._fragments)
    self._merge(account, learner)
    most = collections.Counter()
    for incarnation, tokens in known:
      number = process_of(incarnation)
      most[number] = max(most[number], int(tokens))
    by_process = collections.defaultdict(list)
    for line in lines:
      by_process[line['process']].append(line)
    # A process that never began made no step, and left no checkpoint.
    begun = {
      number: mine
      for number, mine in by_process.items()
      if any(line['kind'] == 'Begin' for line in mine)
    }
    in_memory = collections.defaultdict(list)  # Boundaries gone on from.
    for mine in begun.values():
      begin = next(line for line in mine if line['kind'] == 'Begin')
      if begin['source']['kind'] == SLICE:
        number = begin['source']['process']
        in_memory[number].append(begin['step'])
        # It got so far, whether or not it has written that down.
        most[number] = max(most[number], begin['tokens'])
    saves: dict[tuple[int, int], list[int]] = {}
    for number, mine in begun.items():
      self._read(account, number, mine, saves, in_memory[number])
      process = account.processes[number]
      process.last = max(process.last, most[number])
    self._end(account, learner, begun)
    return account

  def _merge(self, account: TokenAccount, learner: int):
    for line in self._syncer:
      if line['kind'] != 'Publish':
        continue
      p, version = line['fragment'], line['version']
      account.void(p, version)
      for share in line['shares']:
        if share['learner'] == learner:
          name = process_of(share['incarnation']), share['handle']
          account.merge(MergedContribution(p, version, name, share['c_tokens']))

  def _read(
    self,
    account: TokenAccount,
    number: int,
    lines: Lines,
    saves: dict[tuple[int, int], list[int]],
    in_memory: Sequence[int],
  ):
    """Reads one process.

    Args:
      saves: the counts at checkpoints, by process and step; those of
        `in_memory`, steps at whose boundary others went on, are added.
    """
    begin = next(line for line in lines if line['kind'] == 'Begin')
    parent = _parent(begin, saves)
    counts = [begin['tokens'] if self._anew else 0] * self._fragments
    if parent is not None and not self._anew:
      counts = saves[parent, begin['step']]
    process = account.begin(number, begin['tokens'], counts, parent)
    training = False
    waiting = sorted(in_memory)
    for line in lines:
      while waiting and line['step'] > waiting[0]:
        saves[number, waiting.pop(0)] = list(process.counts)
      process.last = line['tokens']
      match line['kind']:
        case 'Begin':
          training = True
        case 'Snapshot':
          process.offers[line['fragment'], line['handle']] = process.last
        case 'Apply':
          account.apply(
            number,
            line['fragment'],
            carry=line['carry'],
            handle=line['handle'],
            overwritten_tokens=line['overwritten_tokens'],
            training=training,
          )
        case 'Save':
          saves[number, line['step']] = list(process.counts)
    for step in waiting:
      saves[number, step] = list(process.counts)

  def _end(
    self, account: TokenAccount, learner: int, begun: Mapping[int, Lines]
  ):
    """Sets the reason of each process's end, as far as it is known."""
    began_s = [mine[0]['time_s'] for mine in begun.values()]
    quarantined_s = [
      line['time_s']
      for line in self._syncer
      if line['kind'] == 'quarantined' and line['learner'] == learner
    ]
    later = [*begun.values()][1:]
    for i, (number, mine) in enumerate(begun.items()):
      process = account.processes[number]
      until_s = began_s[i + 1] if i + 1 < len(began_s) else float('inf')
      ceased = any(line['kind'] == 'Cease' for line in mine)
      if any(began_s[i] <= at_s < until_s for at_s in quarantined_s):
        process.end = QUARANTINED
      elif i + 1 < len(begun):
        after = next(x for x in later[i] if x['kind'] == 'Begin')
        in_memory = after['source']['kind'] == SLICE
        died = SLICE if in_memory else DIED
        process.end = LEFT if ceased else died
      elif self._over and not ceased:
        process.end = DIED


def _parent(begin: Mapping, saves: Iterable[tuple[int, int]]) -> int | None:
  """Returns the process whose checkpoint or memory one has; None: none's.

  One that took a peer's state has a checkpoint of its own all the same, and
  loses it.

  Args:
    saves: process and step of each, in their order.
  """
  step, source = begin['step'], begin['source']
  own = source['kind'] in ('checkpoint', SLICE)
  if own and (source['process'], step) in saves:
    return source['process']
  return next((n for n, at in [*saves][::-1] if step and at == step), None)
