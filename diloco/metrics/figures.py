# SPDX-License-Identifier: Apache-2.0
"""The figures of a run: one table, which everything that shows a run iterates.

To add a figure, add one entry to `RUN` or `LEARNER`. It is then in
`status.json` and `summary.json` (under `name`), in `/metrics` (under `sample`),
among the curves of TensorBoard (under `curve`), and on the surfaces of `shown`:
the table at the end, the live table, the page and the report, sweeps. A figure
that needs a count that nobody keeps yet also needs a field in
`status.RunStatus` or `status.LearnerStatus`, which `syncer.stats` fills.

A figure is computed from a `RunStatus` or `LearnerStatus` alone: the same
object describes a run that goes on, one that is over, and one that was read
back from its folder. None means that the figure is not known.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from diloco.metrics.ages import OLD_STEPS

# Where a figure is shown, besides JSON, `/metrics` and TensorBoard.
END = 'end'  # The table at the end of a run.
LIVE = 'live'  # The table while a run goes on.
WIDE = 'wide'  # The same, on a terminal that has room for it.
LINE = 'line'  # Lines of a log, in its place.
PAGE = 'page'  # The page, live or of a finished run, and the report.
SWEEP = 'sweep'  # The tables of sweeps.
# What TensorBoard compares runs by, beside their configurations.
COMPARED = 'compared'

UNITS = ('B', 'kB', 'MB', 'GB', 'TB')
UNKNOWN = '-'


# Formats ----------------------------------------------------------------------


def whole(value: float) -> str:
  """A number as '12,345'."""
  return f'{value:,.0f}'


def share(value: float) -> str:
  """A ratio as '87.3%'."""
  return f'{value:.1%}'


def nats(value: float) -> str:
  """A loss as '2.123'."""
  return f'{value:.3f}'


def hundredths(value: float) -> str:
  """A number as '0.57'."""
  return f'{value:.2f}'


def in_bytes(value: float) -> str:
  """Bytes as '812 B', '1.3 MB', '123 MB'; one MB is 10⁶ bytes."""
  value = float(value)
  for unit in UNITS[:-1]:
    if value < 999.5:
      digits = 1 if value < 9.95 and unit != 'B' else 0
      return f'{value:.{digits}f} {unit}'
    value /= 1000
  return f'{value:.1f} {UNITS[-1]}'


def clock(time_s: float) -> str:
  """Seconds as '0:05', '12:03', '3:12:03'."""
  minutes, seconds = divmod(round(time_s), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02}:{seconds:02}'
  return f'{minutes}:{seconds:02}'


def seconds(value: float) -> str:
  """A short time as '12 ms' or '2.50 s'."""
  return f'{value * 1000:.0f} ms' if value < 1 else f'{value:.2f} s'


def link(load: float) -> str:
  """The load of a link as '12.0%'; above 1 as '1.8 × too slow'."""
  return f'{load:.1f} × too slow' if load > 1 else share(load)  # noqa: RUF001


# The table --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Figure:
  """One figure of a run or of a learner.

  Attributes:
    name: its key in `status.json` and `summary.json`, and its name in code.
    label: what tables and pages call it.
    unit: of the value, such as 's' or 'B'; '' for a count or a ratio.
    value: computes it from the status; None: it is not known.
    meaning: one sentence, the help text of `/metrics` and of the page.
    sample: its name in `/metrics`, after the prefix `diloco_`.
    format: makes text of a value that is known.
    shown: the surfaces that show it.
    short: what one line calls it; '' for the label.
    note: a few words next to the number, from the same status; '' for none.
    curve: its name in TensorBoard, over the global step; None: no curve.
    kind: 'gauge' or 'counter', as Prometheus has it.
  """

  name: str
  label: str
  unit: str
  value: Callable
  meaning: str
  sample: str
  format: Callable[[float], str] = whole
  shown: frozenset[str] = frozenset()
  short: str = ''
  note: Callable[..., str] = lambda status: ''
  curve: str | None = None
  kind: str = 'gauge'

  def text(self, value: float | None) -> str:
    """Returns the value as people read it."""
    return UNKNOWN if value is None else self.format(value)

  def text_in(self, status) -> str:
    """Returns the text of its value in a status, with the note."""
    value = self.value(status)
    note = '' if value is None else self.note(status)
    return f'{self.text(value)} {note}' if note else self.text(value)


def participation(merged: int, rounds: int, learners: int = 1) -> float | None:
  """Returns the share of closed rounds that merged a learner, or the mean over
  learners; None before the first round.

  Args:
    merged: contributions that closed rounds merged.
    rounds: closed rounds.
    learners: that could have been in each.
  """
  return merged / (rounds * learners) if rounds and learners else None


def bytes_per_parameter(
  pulled_bytes: int, pulls: int, fragments: int, parameters: int
) -> float | None:
  """Returns bytes per parameter one way, for one round trip of all P fragments.

  One pull carries one of P fragments, so P pulls carry every parameter once;
  f32 needs 4, bf16 needs 2. None if nothing was pulled.
  """
  if not pulls or not parameters:
    return None
  return pulled_bytes * fragments / (pulls * parameters)


def _field(name: str) -> Callable:
  return lambda status: getattr(status, name)


def _entry(name: str, label: str, unit: str, meaning: str, sample: str, **more):
  shown = frozenset(more.pop('shown', '').split())
  value = more.pop('value', _field(name))
  return Figure(name, label, unit, value, meaning, sample, shown=shown, **more)


def _sum(name: str) -> Callable:
  """Returns what sums a field of all learners; None if it is not known."""

  def total(status):
    values = [getattr(x, name) for x in status.learners]
    known = [x for x in values if x is not None]
    return sum(known) if values and len(known) == len(values) else None

  return total


def _participation(status) -> float | None:
  """Returns the mean over the planned learners, and newcomers that are there.

  A newcomer that has left would count as absent to the end.
  """
  planned = status.planned or 0
  shares = [
    x.participation
    for x in status.learners
    if x.learner < planned or x.learner in status.live
  ]
  if not shares or None in shares:
    return None
  return math.fsum(shares) / max(planned, len(shares))


def _loss(status) -> float | None:
  losses = [
    x.loss
    for x in status.learners
    if x.learner in status.live and x.loss is not None
  ]
  return math.fsum(losses) / len(losses) if losses else None


def _stall_max_s(status) -> float | None:
  known = [x.stall_max_s for x in status.learners if x.stall_max_s is not None]
  return max(known, default=None)


def _slow_link(status) -> tuple[float, int] | None:
  """Returns the load of the slowest link and its learner, if it is too slow."""
  loads = [(x.link_load, x.learner) for x in status.learners if x.link_load]
  slowest = max(loads, default=(0.0, -1))
  return slowest if slowest[0] > 1 else None


def _f32_note(pulls: str) -> Callable:
  def note(status) -> str:
    whole_pulls = getattr(status, pulls)
    if not status.parameters or not whole_pulls or not status.fragments:
      return ''
    dense = 4 * status.parameters * whole_pulls / status.fragments
    return f'(f32: {in_bytes(dense)})'

  return note


def _per_parameter(way: str) -> Callable:
  def value(status) -> float | None:
    return bytes_per_parameter(
      getattr(status, f'bytes_{way}') or 0,
      getattr(status, f'pulls_{way}') or 0,
      status.fragments or 0,
      status.parameters or 0,
    )

  return value


def _heldout_note(status) -> str:
  if status.heldout_step is None:
    return ''
  return f'at step {status.heldout_step:,}'


def _planned(status) -> str:
  """The last steps before the end may be beyond what was planned."""
  total = status.total_steps
  if not total:
    return ''
  return f'of {total:,}' if status.step <= total else f'({total:,} planned)'


RUN = (
  _entry(
    'heldout_loss', 'held-out loss of Θ', 'nats',
    'Loss of the global model on held-out text, nats per token.',
    'heldout_loss', format=nats, note=_heldout_note,
    short='Θ', shown='live page', curve='run/heldout_loss',
  ),
  _entry(
    'loss', 'training loss', 'nats',
    "Mean of the live learners' last losses, nats per token.",
    'train_loss', value=_loss, format=nats, shown='page', curve='run/loss',
  ),
  _entry(
    'step', 'global step', 'steps', 'Global step t.', 'global_step',
    note=_planned, short='step', shown='end live page',
  ),
  _entry(
    'total_steps', 'steps of the run', 'steps', 'Global steps of the run.',
    'total_steps',
  ),
  _entry(
    'rounds', 'rounds', '', 'Closed rounds.', 'rounds_total',
    shown='end wide page', kind='counter',
  ),
  _entry(
    'tokens', 'tokens', 'tokens',
    'Tokens that all learners have trained on, as they reported.',
    'tokens_total', value=_sum('tokens'), shown='end page', kind='counter',
    curve='run/tokens',
  ),
  _entry(
    'elapsed_s', 'elapsed', 's',
    'Time since the first learner was ready; of a finished run until its last '
    'round.',
    'elapsed_seconds', format=clock, shown='end live page sweep',
  ),
  _entry(
    'goodput', 'goodput', '',
    'Share of the learner time that went into steps that count.',
    'goodput_ratio', format=share, shown='end wide page sweep compared',
    curve='run/goodput',
  ),
  _entry(
    'uptime', 'uptime', '',
    'Share of the time in which at least one learner trained.',
    'uptime_ratio', format=share, shown='end page', curve='run/uptime',
  ),
  _entry(
    'participation', 'participation', '',
    'Share of the closed rounds that merged a learner, mean over learners.',
    'participation_ratio', value=_participation, format=share,
    shown='end page sweep', curve='run/participation',
  ),
  _entry(
    'learners_live', 'live learners', '', 'Live learners.', 'learners_live',
    value=lambda status: len(status.live),
    note=lambda status: f'of {status.planned}' if status.planned else '',
    short='live', shown='live page', curve='run/live_learners',
  ),
  _entry(
    'age_steps', 'age of merged offers', 'steps',
    'Mean age of merged offers, in steps of their learner.',
    'offer_age_steps', format=hundredths, shown='end page sweep',
    note=lambda status: 'steps', curve='run/offer_age_steps',
  ),
  _entry(
    'old_share', 'old offers', '',
    f'Share of the merged offers that were older than {OLD_STEPS} steps.',
    'old_offers_ratio', format=share, shown='end page sweep',
    note=lambda status: f'of the merged offers older than {OLD_STEPS} steps',
  ),
  _entry(
    'refused', 'refused', '', 'Contributions that were not merged.',
    'refused_total', shown='end page', curve='run/refused', kind='counter',
  ),
  _entry(
    'stall_max_s', 'longest stall', 's', 'The longest stall of a step.',
    'stall_max_seconds', value=_stall_max_s, format=seconds, shown='end page',
  ),
  _entry(
    'grace_s', 'grace window', 's', 'The last grace window.', 'grace_seconds',
    format=seconds, shown='page',
  ),
  _entry(
    'quorum_s', 'time to quorum', 's', 'Mean time from due to quorum.',
    'quorum_seconds', format=seconds,
  ),
  _entry(
    'sync_s', 'pull and merge', 's', 'To pull and merge, in the last round.',
    'sync_seconds', format=seconds,
  ),
  _entry(
    'bytes_up', 'bytes up', 'B', 'Payloads of learners.',
    'received_bytes_total', format=in_bytes, note=_f32_note('pulls_up'),
    shown='end page', kind='counter',
  ),
  _entry(
    'bytes_down', 'bytes down', 'B', 'Payloads to learners.',
    'sent_bytes_total', format=in_bytes, note=_f32_note('pulls_down'),
    shown='end page', kind='counter',
  ),
  _entry(
    'bytes_per_parameter_up', 'bytes per parameter, up', 'B',
    'Bytes per parameter of one leg up, for a round of each fragment.',
    'received_bytes_per_parameter', value=_per_parameter('up'), format=nats,
    note=lambda status: '(f32 4, bf16 2)', shown='end page',
  ),
  _entry(
    'bytes_per_parameter_down', 'bytes per parameter, down', 'B',
    'Bytes per parameter of one leg down, for a round of each fragment.',
    'sent_bytes_per_parameter', value=_per_parameter('down'), format=nats,
    note=lambda status: '(f32 4, bf16 2)', shown='end page',
  ),
  _entry(
    'slow_link', 'slowest link', '',
    'Load of the slowest link down, where it is too slow for the updates.',
    'slow_link_ratio', value=lambda status: (_slow_link(status) or [None])[0],
    format=link, note=lambda status: f'(learner {_slow_link(status)[1]})',
    short='link', shown='live',
  ),
  _entry(
    'parameters', 'parameters', '', 'Parameters of the model.', 'parameters',
    shown='end page',
  ),
  _entry(
    'time_s', 'status of', 's', 'When the syncer said so.',
    'status_time_seconds', format=hundredths,
  ),
)  # fmt: skip

# Those of one learner, from its `LearnerStatus`.
LEARNER = (
  _entry(
    'steps', 'steps', 'steps', 'Inner steps, over all incarnations.',
    'learner_steps_total', shown='end live line page', kind='counter',
  ),
  _entry(
    'step', 'own step', 'steps', 'Inner steps of this incarnation.',
    'learner_step',
  ),
  _entry(
    'tokens', 'tokens', 'tokens', 'Tokens that it trained on, as it reported.',
    'learner_tokens_total', shown='end page', kind='counter',
  ),
  _entry(
    'loss', 'loss', 'nats', 'Training loss of its last step, nats per token.',
    'learner_loss', format=nats, shown='live line page',
  ),
  _entry(
    'tokens_per_s', 'tok/s', '1/s', 'Tokens a second.',
    'learner_tokens_per_second', shown='live page',
  ),
  _entry(
    'round', 'round', '', 'The newest round that it offered for.',
    'learner_round', shown='live',
  ),
  _entry(
    'lag_versions', 'lag', '',
    "Its base behind the fragment's version, at the last offer.",
    'learner_lag_versions', shown='live page',
  ),
  _entry(
    'rounds', 'merged in', '', 'Closed rounds that merged it.',
    'learner_rounds_total', shown='end', kind='counter',
  ),
  _entry(
    'participation', 'merged', '', 'Share of the closed rounds that merged it.',
    'learner_participation_ratio', format=share, shown='end live page',
  ),
  _entry(
    'age_steps', 'offer age', 'steps', 'Mean age of its merged offers.',
    'learner_offer_age_steps', format=hundredths, shown='end wide page',
  ),
  _entry(
    'incarnations', 'starts', '', 'Incarnations.',
    'learner_incarnations_total', shown='end', kind='counter',
  ),
  _entry(
    'stall_share', 'stall', '',
    'Share of the time of its steps in which they waited for the exchange.',
    'learner_stall_ratio', format=share, shown='page',
  ),
  _entry(
    'stall_max_s', 'longest stall', 's', 'The longest stall of a step.',
    'learner_stall_max_seconds', format=seconds, shown='end wide page',
  ),
  _entry(
    'link_load', 'link', '',
    'Time to fetch an update, by the time between two: above 1 the link down '
    'is too slow by that factor.',
    'learner_link_load_ratio', format=link, shown='page',
  ),
  _entry(
    'bytes_up', 'up', 'B', 'Payload bytes pulled from it.',
    'learner_received_bytes_total', format=in_bytes, shown='end live page',
    kind='counter',
  ),
  _entry(
    'bytes_down', 'down', 'B', 'Payload bytes that it pulled.',
    'learner_sent_bytes_total', format=in_bytes, shown='end live page',
    kind='counter',
  ),
)  # fmt: skip


def named(name: str, table=RUN) -> Figure:
  """Returns the figure of that name."""
  return next(figure for figure in table if figure.name == name)


def shown(table, *surfaces: str) -> Iterator[Figure]:
  """Yields the figures of a table that any of the surfaces shows, in order."""
  return (figure for figure in table if figure.shown & {*surfaces})


def values(table, status) -> dict[str, float | None]:
  """Returns all figures of a status by their names, as JSON has them."""
  return {x.name: x.value(status) for x in table}


def curves(status) -> dict[str, float]:
  """Returns what of a status is a curve over the global step."""
  values = {x.curve: x.value(status) for x in RUN if x.curve}
  return {name: value for name, value in values.items() if value is not None}
