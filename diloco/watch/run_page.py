# SPDX-License-Identifier: Apache-2.0
"""The page of runs: how good the model is first, then what happened to it.

One run, live or over, of processes or of the lab, or several side by side. All
figures are those of `diloco.metrics.figures`; times are seconds since the
first learner was ready.
"""

import json
import math
from collections.abc import Iterator, Sequence

from diloco.metrics import figures, recorded_run
from diloco.metrics.recorded_run import SYNCER, FollowedRun, Life
from diloco.metrics.status import LIVE, bits
from diloco.metrics.workdir import Workdir, learner_name
from diloco.pages import parts
from diloco.pages.parts import (
  Badge,
  Cell,
  Chart,
  Column,
  Line,
  Part,
  Prose,
  Table,
  Tile,
  Timeline,
  TimelineSpan,
)

SINCE = 'seconds since the first learner was ready'
# Tiles after that of the loss; the others are in a table.
HEADLINE = (
  'step', 'tokens', 'elapsed_s', 'goodput', 'participation', 'bytes_up',
  'bytes_down',
)  # fmt: skip
DEATHS_MAX = 20  # That are told one by one.
WORSE = 1.01  # A final loss above the best one by more is said.
TONES = {
  recorded_run.FINISHED: 'good',
  recorded_run.RUNNING: 'good',
  recorded_run.STOPPED: 'bad',
}
# Columns of a fault of a chaos run, by the key of its outcome.
FAULTS = {
  'number': ('fault', 1),
  'kind': ('kind', 1),
  'target': ('target', 1),
  'at': ('at s', 1),
  'back_s': ('back after s', 1),
  'lost_s': ('lost, learner·s', 1),
  'stall_s': ("others' longest stall s", 2),
  'counted': ('counted by the relay', 1),
  'failed': ('why not', 1),
}
RUNNING_STATES = (LIVE, 'running')
# What a page says of a configuration, if it has the key.
SAID = (
  ('{} learners (M)', 'protocol.learners'),
  ('quorum {} (K)', 'protocol.quorum'),
  ('a sync of each fragment every {} steps (H)', 'protocol.sync_every_steps'),
  ('{} fragments (P)', 'protocol.fragments'),
  ('overlap {} (τ)', 'protocol.overlap_steps'),
  ('{} up', 'codec.up'),
  ('{} down', 'codec.down'),
)


def head(run: FollowedRun) -> dict:
  """Returns the fields of a page about one run alone."""
  step = run.status.step if run.status else 0
  total_steps = run.setup.total_steps
  return {
    'name': run.setup.name,
    'title': run.setup.name,
    'where': str(run.workdir.root.resolve()),
    'badge': badge(run),
    'progress': (min(step, total_steps), total_steps),
    'tiles': tuple(tiles(run)),
  }


def sections(runs: Sequence[FollowedRun]) -> Iterator[Part]:
  """Yields the parts of the page: what is asked first comes first."""
  several = len(runs) > 1
  names = [f'-{i}' if several else '' for i in range(len(runs))]
  heads = [f'{run.label}: ' if several else '' for run in runs]
  if several:
    yield figure_table(runs)
    yield from charts(runs)
  for run, suffix, head in zip(runs, names, heads):
    if deaths := list(_deaths(run)):
      more = len(deaths) - DEATHS_MAX
      notes = (f'{more} earlier ones are not told.',) if more > 0 else ()
      shown = tuple(deaths[-DEATHS_MAX:])
      yield Prose(f'deaths{suffix}', f'{head}What deaths cost', shown, notes)
    yield from _faults(run, suffix, head)
    yield timeline(run, f'timeline{suffix}', f'{head}Timeline')
  if not several:
    yield from charts(runs)
  yield process_table(runs)
  if not several:
    yield figure_table(runs)
  for run, suffix, head in zip(runs, names, heads):
    yield _happenings(run, f'happenings{suffix}', f'{head}What happened last')
    if run.workdir.sample.exists():
      text = run.workdir.sample.read_text(errors='replace')
      title = f'{head}What the final model writes'
      yield Prose(f'sample{suffix}', title, (text.strip(),))


# The head ---------------------------------------------------------------------


def badge(run: FollowedRun) -> Badge:
  """Green only while every learner lives, or when the run is over."""
  how = run.state()
  if how == recorded_run.RUNNING:
    states = run.states()
    live = sum(states[name] in RUNNING_STATES for name in run.learners)
    if live < len(run.learners) or states[SYNCER] == 'dead':
      gone = ', no syncer' if states[SYNCER] == 'dead' else ''
      return Badge(f'{live} of {len(run.learners)} learners{gone}', 'wait')
  return Badge(how, TONES.get(how, 'wait'))


def tiles(run: FollowedRun) -> Iterator[Tile]:
  """Yields the figures that are looked at first, the loss of Θ before all."""
  heldout = figures.named('heldout_loss')
  value = run.status and heldout.value(run.status)
  yield Tile(heldout.label, heldout.text(value), _verdict(run), large=True)
  for name in HEADLINE:
    figure = figures.named(name)
    value = run.status and figure.value(run.status)
    if value is not None:
      yield Tile(figure.label, figure.text(value), figure.note(run.status))


def sentences(runs: Sequence[FollowedRun]) -> Iterator[str]:
  """Yields one sentence for each run: the model, the protocol, the machine."""
  for run in runs:
    lines = [_model(run)]
    for text, key in SAID:
      section, name = key.split('.')
      value = run.config.get(section, {}).get(name)
      if value is not None:
        lines.append(text.format(value))
    if machine := run.machine():
      cores = machine.get('cores')
      lines.append(
        f'on {machine.get("kind", machine.get("platform"))}'
        + (f' with {cores} cores' if cores else '')
        + f', jax {machine.get("jax")}'
      )
    head = f'{run.label}: ' if len(runs) > 1 else ''
    yield f'{head}{", ".join(lines)}.'


def problems(runs: Sequence[FollowedRun]) -> str:
  """Returns what is wrong with the runs' files, or '' if nothing is."""
  lines = []
  for run in runs:
    own = [run.problem] if run.problem else []
    if run.state() == recorded_run.SILENT:
      at_s = run.status.time_s - run.begin_s
      own.append(f'The syncer has written nothing since {at_s:.0f} s.')
    if own:
      lines.append(f'{run.label}: {" ".join(own)}')
  return ' '.join(lines)


def _verdict(run: FollowedRun) -> str:
  """Says what the loss of Θ is to be compared with."""
  points = run.heldout()
  if not points:
    every = run.config.get('run', {}).get('eval_every_rounds')
    when = f'every {every} rounds' if every else 'once the run is over'
    return f'is evaluated {when}'
  _, step, loss = points[-1]
  words, evaluation = ['nats per token'], run.evaluation
  if evaluation is not None:
    per_byte = bits(loss) / evaluation.bytes_per_token
    words = ['nats per byte' if evaluation.bytes_per_token == 1 else words[0]]
    words.append(f'{per_byte:.2f} bits per byte')
    if evaluation.bigram_loss is not None:
      verb = 'beats' if loss < evaluation.bigram_loss else 'not yet'
      words.append(f'{verb} a table of bigrams, {evaluation.bigram_loss:.3f}')
  else:
    words.append(f'at step {step:,.0f}')
  best, at = min((x, at) for _, at, x in points)
  if loss > WORSE * best:
    words.append(f'the best was {best:.3f}, at step {at:,.0f}')
  return '; '.join(words)


def _model(run: FollowedRun) -> str:
  kind = run.config.get('model', {}).get('kind', 'model')
  parameters = run.status and run.status.parameters
  return f'{kind} of {parameters:,} parameters' if parameters else str(kind)


# What happened ----------------------------------------------------------------


def _deaths(run: FollowedRun) -> Iterator[str]:
  """Yields a sentence on each death: what it cost, and how it was healed.

  Of a learner's hosts the leading one tells, which ends with each other.
  """
  deaths = [x for x in run.deaths() if '.' not in x.process]
  lives, _ = run.lives()
  many = {name: sum(d.process == name for d in deaths) for name in lives}
  for death in deaths:
    yield _death(run, death, lives[death.process], many[death.process])


def _death(
  run: FollowedRun, death: Life, lives: Sequence[Life], deaths: int
) -> str:
  at_s = death.ended_s
  how = death.death.rstrip(': ')
  head = f'{death.process} at {at_s - run.begin_s:.1f} s, {how}:'
  later = [x for x in lives if x.started_s >= at_s]
  # Of a shard of the syncer it is not known when it was of use.
  of_shard = death.process != SYNCER and death.process not in run.learners
  used = [(x, x.started_s if of_shard else x.used_s) for x in later]
  back, back_s = next((x for x in used if x[1] is not None), (None, 0.0))
  if back is None:
    how = 'starts again' if later else 'has not come back'
    return f'{head} down for {run.last_s - at_s:.1f} s so far, {how}.'
  details = [f'down for {back_s - at_s:.1f} s']
  if death.process == SYNCER:
    closed = [x.at_s for x in run.rounds if x.at_s > at_s]
    if closed:
      details.append(
        f'the next round closed {min(closed) - at_s:.1f} s after its death'
      )
  if death.process not in run.learners:
    return f'{head} {"; ".join(details)}.'
  m = list(run.learners).index(death.process)
  lost = run.lost_tokens().get(m)
  if lost is not None:
    all_of = f' (all its {deaths} deaths together)' if deaths > 1 else ''
    details.append(f'lost {lost:,.0f} tokens{all_of}')
  ready = [x for x in run.readied if x[0] > at_s and x[1] == m]
  if ready:
    ready_s, _, state = min(ready)
    details[0] = f'down for {ready_s - at_s:.1f} s'
    details.append(f'back {state}')
  merged = [
    each.at_s
    for each in run.rounds
    if each.at_s > back.started_s and any(s.learner == m for s in each.shares)
  ]
  if merged:
    details.append(f'merged again {min(merged) - at_s:.1f} s after its death')
  return f'{head} {"; ".join(details)}.'


def fault_rows(run_dir: Workdir, begin_s: float) -> list[tuple[Cell, ...]]:
  """Returns a row per fault of a chaos run; none if it was not judged.

  Args:
    begin_s: since the epoch; what times are counted from.
  """
  try:
    verdict = json.loads((run_dir.chaos / 'verdict.json').read_text())
    course = json.loads((run_dir.chaos / 'course.json').read_text())
  except FileNotFoundError:
    return []
  rows = []
  for each in verdict['outcomes']:
    at_s = each['begun_s']
    if at_s is not None:  # It was performed.
      at_s += course['began_s'] - begin_s
    rows.append(tuple(each[key] if key != 'at' else at_s for key in FAULTS))
  return rows


def _faults(run: FollowedRun, suffix: str, head: str) -> Iterator[Table]:
  if rows := fault_rows(run.workdir, run.begin_s):
    yield Table(
      f'faults{suffix}',
      f'{head}Faults, and what the others did',
      tuple(Column(name, digits) for name, digits in FAULTS.values()),
      tuple(rows),
      notes=(
        'Back: merged again, or a round closed again. Lost: time of its target '
        'without a step meanwhile. Longest stall: between two steps of any '
        'learner that no fault explains, less its usual step. Counted: bytes '
        'that were held, delayed or throttled, or chunks that stalled.',
      ),
    )


def timeline(run: FollowedRun, name: str, title: str) -> Timeline:
  """Returns the lanes of the learners, of the syncer and of its rounds."""
  begin_s, end_s = run.begin_s, run.end_s()
  lanes = [*run.learners, SYNCER]
  lives, pauses = run.lives()
  spans, marks = [], []
  for lane, process in enumerate(lanes):
    own = [*_present(run, process, lives.get(process, ()), end_s)]
    own += [(a, b, 'pause') for who, a, b in pauses if who == process]
    for a, b, kind in own:
      if a < min(b, end_s):
        spans.append(
          TimelineSpan(lane, a - begin_s, min(b, end_s) - begin_s, kind)
        )
    marks += [
      (life.ended_s - begin_s, lane, 'death')
      for life in lives.get(process, ())
      if life.death
    ]
  rounds = []
  for each in run.rounds:
    due_s, quorum_s, window_s = each.times_s
    merged = ', '.join(str(share.learner) for share in each.shares)
    label = f'round {each.number} at step {each.step} merged {merged or "none"}'
    seconds = (x - begin_s for x in (due_s, quorum_s, window_s, each.at_s))
    rounds.append((label, *seconds))
    marks += [
      (window_s - share.age_s - begin_s, share.learner, f'merged {each.number}')
      for share in each.shares
      if share.learner < len(run.learners)
    ]
  many, of_rounds = parts.rounds_of(rounds, len(lanes))
  notes = ['A line below a lane: an offer of that learner that was merged.']
  if run.rounds and run.rounds[0].number > 1:
    notes.append(f'Rounds before {run.rounds[0].number:,} are not shown.')
  return Timeline(
    name,
    title,
    (*lanes, *('rounds' if i == 0 else '' for i in range(many))),
    (*spans, *of_rounds),
    tuple(marks),
    tuple(notes),
    groups=(*range(len(run.learners)), *[-1] * (1 + many)),
  )


def _present(
  run: FollowedRun, process: str, lives: Sequence[Life], end_s: float
) -> Iterator[tuple[float, float, str]]:
  """Yields (begin, end, kind) of a process: its work and its absences."""
  learner = run.learners.get(process)
  for begin_s, until_s in learner.spans if learner else ():
    yield begin_s, until_s, 'step'
  for life in lives:  # Not every step is on file.
    if life.used_s is not None:
      yield life.used_s, min(life.ended_s, end_s), 'step'
  yield from recorded_run.absences(lives)


# Charts -----------------------------------------------------------------------


def charts(runs: Sequence[FollowedRun]) -> Iterator[Chart]:
  """Yields the losses first, then how the rounds went."""
  alone = runs[0] if len(runs) == 1 else None
  yield loss_chart(runs)
  if alone is None:
    yield loss_by_tokens(runs)
  yield _chart(
    runs,
    'participation',
    'Participation, share of the rounds that merged it',
    '%',
    [
      _line(alone, name, each.merged.points(), i, 100.0)
      for i, (name, each) in enumerate(alone.learners.items())
    ]
    if alone
    else [
      _line(run, run.label, _merged(run), i, 100.0)
      for i, run in enumerate(runs)
    ],
    (0.0, 105.0),
  )
  for name, title, unit, factor, values in (
    ('age', 'Age of merged offers', 'steps', 1.0, lambda run: run.age),
    ('goodput', 'Goodput so far', '%', 100.0, lambda run: run.goodput),
  ):
    lines = [
      _line(run, run.label if alone is None else 'mean', points, i, factor)
      for i, run in enumerate(runs)
      for points in [values(run).points()]
    ]
    limits = (0.0, 105.0) if unit == '%' else None
    yield _chart(runs, name, title, unit, lines, limits)
  if alone:
    waits = [
      _line(alone, label, [(p[0], p[i + 1]) for p in alone.waits.points()], i)
      for i, label in enumerate(('quorum', 'grace window', 'pull and merge'))
    ]
    yield _chart(runs, 'waits', 'What rounds wait for', 'seconds', waits)


def loss_chart(runs: Sequence[FollowedRun], title: str = 'Loss') -> Chart:
  """Returns held-out loss of Θ before the learners' own, over time."""
  alone = len(runs) == 1
  lines = []
  for i, run in enumerate(runs):
    points = [(at_s, loss) for at_s, _, loss in run.heldout()]
    label = 'Θ, held out' if alone else run.label
    lines.append(_line(run, label, points, i, kind='validation', ink=alone))
  if alone:
    bigram = runs[0].evaluation and runs[0].evaluation.bigram_loss
    if bigram is not None:
      ends = [(runs[0].begin_s, bigram), (runs[0].last_s, bigram)]
      lines.append(
        _line(runs[0], 'table of bigrams', ends, 0, ink=True, dashed=True)
      )
    lines += [
      _line(runs[0], name, each.loss.points(), i, kind='training')
      for i, (name, each) in enumerate(runs[0].learners.items())
    ]
  note = (
    'Training: each learner with its own parameters. Held out: the global '
    'model on text that no learner trains on.'
  )
  return _chart(runs, 'loss', title, 'nats per token', lines, notes=(note,))


def loss_by_tokens(runs: Sequence[FollowedRun]) -> Chart:
  """Returns the held-out losses of several runs at equal tokens."""
  lines = []
  for i, run in enumerate(runs):
    points = [(run.tokens_at(at_s), loss) for at_s, _, loss in run.heldout()]
    xs, ys = zip(*points) if points else ((), ())
    lines.append(Line(run.label, 'validation', xs, ys, group=i))
  return Chart(
    'loss-tokens',
    'Held-out loss against tokens',
    'tokens trained by all learners',
    'nats per token',
    tuple(lines),
  )


def _line(
  run: FollowedRun,
  label: str,
  points: Sequence[tuple[float, ...]],
  group: int,
  factor: float = 1.0,
  kind: str = 'course',
  **more,
) -> Line:
  """Returns a line of (time since the epoch, value)."""
  xs = tuple(point[0] - run.begin_s for point in points)
  ys = tuple(factor * point[1] for point in points)
  return Line(label, kind, xs, ys, group=group, **more)


def _merged(run: FollowedRun) -> list[tuple[float, float]]:
  """Returns the mean of the learners' curves, which have the same times."""
  curves = [each.merged.points() for each in run.learners.values()]
  return [
    (points[0][0], math.fsum(y for _, y in points) / len(points))
    for points in zip(*curves)
  ]


def _chart(
  runs: Sequence[FollowedRun],
  name: str,
  title: str,
  y_label: str,
  lines: Sequence[Line],
  y_range: tuple[float, float] | None = None,
  notes: tuple[str, ...] = (),
) -> Chart:
  """Over time; of a single run with its deaths."""
  alone = runs[0] if len(runs) == 1 else None
  groups = {name: i for i, name in enumerate([*runs[0].learners, SYNCER])}
  moments = [
    (
      death.ended_s - alone.begin_s,
      groups.get(death.process, len(groups)),
      f'{death.process} dies',
    )
    for death in (alone.deaths() if alone else ())
  ]
  return Chart(
    name,
    title,
    SINCE,
    y_label,
    tuple(lines),
    x_range=(0.0, max(1.0, *(run.end_s() - run.begin_s for run in runs))),
    y_range=y_range,
    moments=tuple(moments),
    notes=notes,
  )


# Tables -----------------------------------------------------------------------


def figure_table(runs: Sequence[FollowedRun]) -> Table:
  """Returns a row per figure, a column per run, and what the figure means."""
  rows = []
  for figure in figures.shown(figures.RUN, figures.PAGE):
    values = [run.status and figure.value(run.status) for run in runs]
    if any(value is not None for value in values):
      texts = [run.status and figure.text_in(run.status) for run in runs]
      rows.append((figure.label, *texts, *values, figure.meaning))
  names = [run.label if len(runs) > 1 else 'value' for run in runs]
  return Table(
    'figures',
    'All figures',
    (
      Column('figure'),
      *(Column(name) for name in names),
      *(Column(f'{name}, all digits', hidden=True) for name in names),
      Column('meaning'),
    ),
    tuple(rows),
  )


def process_table(runs: Sequence[FollowedRun]) -> Table:
  """Returns a row per process: its state, and the figures of a learner."""
  known, keys = [], []
  for run in runs:
    lives, _ = run.lives()
    rows = run.status.learners if run.status else ()
    of_learner = {learner_name(each.learner): each for each in rows}
    for name, how in run.states().items():
      started = len(lives.get(name, ())) or None
      keys.append((run.label, name, how, started))
      known.append(of_learner.get(name))
  shown = [*figures.shown(figures.LEARNER, figures.PAGE)]
  values = [[x and figure.value(x) for x in known] for figure in shown]
  kept = [i for i, column in enumerate(values) if set(column) != {None}]
  return Table(
    'processes',
    'Processes',
    (
      Column('run', hidden=len(runs) == 1),
      Column('process'),
      Column('state'),
      Column('starts'),
      *(Column(shown[i].label, format=shown[i].format) for i in kept),
    ),
    tuple(
      (*key, *(values[i][row] for i in kept)) for row, key in enumerate(keys)
    ),
  )


def _happenings(run: FollowedRun, name: str, title: str) -> Table:
  """Returns starts, deaths and decisions, the newest first."""
  newest = sorted(run.happenings, key=lambda each: each[0], reverse=True)
  return Table(
    name,
    title,
    (Column('at s', 1), Column('process'), Column('what'), Column('why')),
    tuple((at_s - run.begin_s, *rest) for at_s, *rest in newest),
  )
