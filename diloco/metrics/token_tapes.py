# SPDX-License-Identifier: Apache-2.0
"""The token ledger of a run of processes, from its tapes."""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from diloco.metrics import names, token_ledger
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.token_ledger import (
  MergedContribution,
  TokenAccount,
  TokenCounts,
)
from diloco.metrics.workdir import Workdir, learner_name
from diloco.protocol.config import BLENDS
from diloco.protocol.incarnation import process_of

Lines = Sequence[Mapping]  # Raw lines of a tape.
Rows = dict[tuple[int, int], TokenCounts]  # By learner and fragment.


def rows(
  syncer: Lines,
  learners: Mapping[int, Lines],
  steps: Mapping[int, Iterable[tuple[int, int]]],
  fragments: int,
  blend: str = 'carry',
) -> Rows:
  """Returns the balance of each learner and fragment.

  The tokens of a learner's step are those of its offers, as it reported them.

  Steps that a killed process had not reported are not known to have been
  trained. What the last process of a learner has pending is lost only if the
  run has ended without it: otherwise a restart may resume it.

  Args:
    steps: by learner id, (incarnation, own step) from the metrics.
    blend: the run's blend; with 'mix' a process counts anew after a checkpoint.
  """
  reader = _Reader(syncer, fragments, BLENDS[blend].mixes)
  ids = {*learners, *(m for _, _, m, _ in _shares(syncer))}
  return {
    (m, p): account.row(p)
    for m in sorted(ids)
    for account in [reader.account(m, learners.get(m, ()), steps.get(m, ()))]
    for p in range(fragments)
  }


def rows_of(workdir: Workdir, fragments: int, blend: str = 'carry') -> Rows:
  """Returns the balances of the run in `workdir`.

  Raises:
    CorruptLine: a file is not what a run writes.
  """
  ids = [
    int(path.stem.rpartition('-')[2])
    for path in sorted(workdir.tapes.glob('learner-*.jsonl'))
  ]
  return rows(
    read_jsonl(workdir.tape),
    {m: read_jsonl(workdir.learner_tape(m)) for m in ids},
    {
      m: [
        (int(line[names.INCARNATION]), line['step'])
        for line in read_jsonl(workdir.metrics(learner_name(m)))
        if names.INCARNATION in line
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
    self._per_step = 0  # Tokens of a step of the learner that is read.
    self._over = any(line['kind'] == 'End' for line in syncer)

  def account(
    self, learner: int, lines: Lines, steps: Iterable[tuple[int, int]]
  ) -> TokenAccount:
    account = TokenAccount(self._fragments)
    self._per_step = self._tokens_per_step(learner, lines)
    self._merge(account, learner)
    known = self._known_steps(learner, steps)
    by_process = collections.defaultdict(list)
    for line in lines:
      by_process[line['process']].append(line)
    # A process that never began made no step, and left no checkpoint.
    begun = {
      number: mine
      for number, mine in by_process.items()
      if any(line['kind'] == 'Begin' for line in mine)
    }
    saves: dict[tuple[int, int], list[int]] = {}
    for number, mine in begun.items():
      self._read(account, number, mine, saves)
      process = account.processes[number]
      last = known.get(number, 0) * self._per_step
      process.last = max(process.last, last)
    self._end(account, learner, begun)
    return account

  def _tokens_per_step(self, learner: int, lines: Lines) -> int:
    """Returns the tokens of a learner's step, as its offers name them.

    One that offered nothing has those of the others; 0: nobody offered.
    """
    shares = [(m, share) for _, _, m, share in _shares(self._syncer)]
    copies = [x for x in lines if x['kind'] == 'Snapshot']
    for offers in (
      copies,
      (share for m, share in shares if m == learner),
      (share for _, share in shares),
    ):
      for each in offers:
        if each.get('c_steps'):
          return each['c_tokens'] // each['c_steps']
    return 0

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

  def _known_steps(
    self, learner: int, steps: Iterable[tuple[int, int]]
  ) -> dict[int, int]:
    """Returns the last own step that is known, by process."""
    known = collections.Counter()
    offered = (
      (share['incarnation'], share['step'])
      for _, _, m, share in _shares(self._syncer)
      if m == learner
    )
    for incarnation, step in itertools.chain(offered, steps):
      number = process_of(incarnation)
      known[number] = max(known[number], step)
    return known

  def _read(
    self,
    account: TokenAccount,
    number: int,
    lines: Lines,
    saves: dict[tuple[int, int], list[int]],
  ):
    """Reads one process.

    `saves` has the counts at checkpoints, by process and step.
    """
    begin = next(line for line in lines if line['kind'] == 'Begin')
    position = begin['step'] * self._per_step
    process = account.begin(number, position, self._counts_at(begin, saves))
    training = False
    for line in lines:
      process.last = line['step'] * self._per_step
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

  def _counts_at(
    self, begin: Mapping, saves: Mapping[tuple[int, int], list[int]]
  ) -> list[int]:
    """Returns the positions from which a process's own state has progress.

    A process that took a peer's state has a checkpoint of its own all the same,
    and loses it.
    """
    step, source = begin['step'], begin['source']
    if self._anew:
      return [step * self._per_step] * self._fragments
    if source['kind'] == 'checkpoint' and (source['process'], step) in saves:
      return saves[source['process'], step]
    own = [counts for (_, at), counts in saves.items() if at == step]
    return own[-1] if step and own else [0] * self._fragments

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
    for i, (number, mine) in enumerate(begun.items()):
      process = account.processes[number]
      until_s = began_s[i + 1] if i + 1 < len(began_s) else float('inf')
      ceased = any(line['kind'] == 'Cease' for line in mine)
      if any(began_s[i] <= at_s < until_s for at_s in quarantined_s):
        process.end = token_ledger.QUARANTINED
      elif i + 1 < len(begun):
        process.end = token_ledger.LEFT if ceased else token_ledger.DIED
      elif self._over and not ceased:
        process.end = token_ledger.DIED
