# SPDX-License-Identifier: Apache-2.0
"""The state of a run in the text format of Prometheus."""

from collections.abc import Iterator

from diloco.metrics.status import RunStatus

# Name: field of `RunStatus`, type, help.
OF_RUN = {
  'global_step': ('step', 'counter', 'Global step t.'),
  'total_steps': ('total_steps', 'gauge', 'Global steps of the whole run.'),
  'rounds_total': ('closed_round', 'counter', 'Closed rounds.'),
  'goodput_ratio': ('goodput', 'gauge', 'Useful over allocated time.'),
  'uptime_ratio': ('uptime', 'gauge', 'Time with a learner that steps.'),
  'grace_seconds': ('grace_s', 'gauge', 'The last grace window.'),
  'offer_age_steps': ('age_steps', 'gauge', 'Mean age of merged offers.'),
  'received_bytes_total': ('bytes_up', 'counter', 'Payloads of learners.'),
  'sent_bytes_total': ('bytes_down', 'counter', 'Payloads to learners.'),
  'refused_total': ('refused', 'counter', 'Contributions not merged.'),
  'status_time_seconds': ('time_s', 'gauge', 'When the syncer said so.'),
}
# The same of `LearnerStatus`.
OF_LEARNER = {
  'learner_step': ('step', 'gauge', 'Inner steps of this incarnation.'),
  'learner_loss': ('loss', 'gauge', 'Training loss, nats per token.'),
  'learner_tokens_per_second': ('tokens_per_s', 'gauge', 'Tokens a second.'),
  'learner_participation_ratio': (
    'participation',
    'gauge',
    'Share of the closed rounds that merged it.',
  ),
  'learner_offer_age_steps': ('age_steps', 'gauge', 'Age of its offers.'),
  'learner_stall_max_seconds': ('stall_max_s', 'gauge', 'Longest stall.'),
  'learner_incarnations_total': ('incarnations', 'counter', 'Incarnations.'),
}


def text(status: RunStatus | None) -> str:
  """Returns all samples; none before the first status."""
  return ''.join(f'{line}\n' for line in _lines(status)) if status else ''


def _lines(status: RunStatus) -> Iterator[str]:
  run = f'run="{_escaped(status.run)}"'
  for name, (field, kind, meaning) in OF_RUN.items():
    yield from _family(name, kind, meaning, [(run, getattr(status, field))])
  live = len(status.live)
  yield from _family('learners_live', 'gauge', 'Live learners.', [(run, live)])
  for name, (field, kind, meaning) in OF_LEARNER.items():
    samples = [
      (f'{run},learner="{each.learner}"', getattr(each, field))
      for each in status.learners
    ]
    yield from _family(name, kind, meaning, samples)


def _family(name: str, kind: str, meaning: str, samples) -> Iterator[str]:
  """Yields one metric; values that are not known are left out."""
  known = [(labels, value) for labels, value in samples if value is not None]
  if known:
    yield f'# HELP diloco_{name} {meaning}'
    yield f'# TYPE diloco_{name} {kind}'
    yield from (f'diloco_{name}{{{labels}}} {value}' for labels, value in known)


def _escaped(label: str) -> str:
  escaped = label.replace('\\', '\\\\').replace('"', '\\"')
  return escaped.replace('\n', '\\n')
