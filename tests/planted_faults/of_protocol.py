# SPDX-License-Identifier: Apache-2.0
"""Faults of the protocol: pulls, pace, the end of a run, recovery, donors."""

from tests.planted_faults.fault import fault

TRANSCRIPT = 'tests/protocol/test_transcripts.py::test_transcript'
SEED = 'tests/protocol/test_swarm.py::test_a_seed_that_once_failed'
FETCHED = 'tests/in_process/test_fetched_states.py'
LEAVES = 'tests/protocol/test_protocol_leaves.py'

FAULTS = (
  # Pulls ----------------------------------------------------------------------
  fault(
    'pull known without its handle',
    'diloco/protocol/syncer/pulls.py',
    'if pulled != (event.incarnation, event.handle):',
    'if pulled[0] != event.incarnation:',
    f'{TRANSCRIPT}[pull_given_up]',
    'pull_given_up',
  ),
  fault(
    'cancelled pull is kept',
    'diloco/syncer/shard.py',
    '      self._wanted.discard(job)\n      self._pulled.pop(job, None)\n',
    '      pass\n',
    'tests/syncer/test_pulls.py::test_nothing_is_kept_of_a_cancelled_pull',
    'AssertionError|assert',
  ),
  fault(
    'time-out of pulls never adapts',
    'diloco/protocol/timeouts.py',
    '    return changed(self, stretch=max(self.stretch, stretch), failed=True)',
    '    return self',
    'tests/protocol/test_uneven.py'
    '::test_a_link_that_becomes_nine_times_slower_is_pulled_from_again',
    'assert',
  ),
  fault(
    'time-out of transfers never adapts',
    'diloco/run/payload_parts.py',
    '        self._time = timeouts.after_transfer_failed(',
    '        timeouts.after_transfer_failed(',
    'tests/syncer/test_pulls.py'
    '::test_a_link_that_becomes_nine_times_slower_recovers',
    r'assert \d+ <= 2',
  ),
  fault(
    'round held for a failed pull',
    'diloco/protocol/syncer/pulls.py',
    '      if not pull.failed:\n',
    '      if True:\n',
    'tests/protocol/test_patience.py::test_who_is_not_waited_for',
    'assert',
  ),
  # Pace -----------------------------------------------------------------------
  fault(
    'clock without a bound',
    'diloco/protocol/pace.py',
    '  return max(clock, min(clock + steps, step + ahead_max))',
    '  return clock + steps',
    f'{LEAVES}::test_a_clock_is_at_most_the_rounds_in_flight_beyond_t',
    'assert',
  ),
  fault(
    't leaps when one leaves',
    'diloco/protocol/pace.py',
    'step_after(clocks, quorum, self._step, self._spacing_steps)',
    'step_after(clocks, quorum, self._step, None)',
    f'{LEAVES}::test_t_leaps_by_no_more_than_a_spacing_when_the_slowest_leaves',
    'assert',
  ),
  # The end of a run -----------------------------------------------------------
  fault(
    'finish not in the ledger',
    'diloco/protocol/syncer/closing.py',
    '  state.emit(syncer_events.KeepLedger())\n',
    '',
    f'{TRANSCRIPT}[finish_is_remembered]',
    'finish_is_remembered',
  ),
  fault(
    'handed in is not believed',
    'diloco/protocol/syncer/closing.py',
    '  if state.knows_less:\n    _finish_as_told',
    '  if False:\n    _finish_as_told',
    f'{TRANSCRIPT}[finish_after_a_lost_ledger]',
    'finish_after_a_lost_ledger',
  ),
  fault(
    'handed in after a merge is not believed',
    'diloco/protocol/syncer/closing.py',
    '  if state.finishing or not told or len(told) < len(state.members):\n',
    '  if True:\n',
    f'{TRANSCRIPT}[finish_told_after_a_merge]',
    'finish_told_after_a_merge',
  ),
  fault(
    'progress is carried since a copy of earlier bytes',
    'diloco/protocol/learner/updates.py',
    '    and made.step > fragment.from_step\n',
    '',
    f'{TRANSCRIPT}[full_fragment_twice]',
    'full_fragment_twice',
  ),
  fault(
    'a newcomer keeps the bytes that were given up',
    'diloco/protocol/learner/bootstrap.py',
    '      unlike=fragment.told_otherwise(version, crc),\n',
    '      unlike=False,\n',
    f'{TRANSCRIPT}[newcomer_takes_other_bytes]',
    'newcomer_takes_other_bytes',
  ),
  fault(
    'a newcomer begins with bytes that were given up',
    'diloco/protocol/learner/updates.py',
    '    unlike=fragment.unlike or held_otherwise,\n',
    '',
    f'{TRANSCRIPT}[newcomer_waits_for_other_bytes]',
    'newcomer_waits_for_other_bytes',
  ),
  fault(
    "a newcomer fetches what its donor's older state replaces",
    'diloco/protocol/learner/updates.py',
    '  if not core.state.settled:\n',
    '  if False:\n',
    f'{TRANSCRIPT}[newcomer_ahead_of_its_donor]',
    'newcomer_ahead_of_its_donor',
  ),
  fault(
    'bytes that were given up on their way are believed',
    'diloco/protocol/learner/updates.py',
    '  unlike = fragment.told_otherwise(*arrived)\n',
    '  unlike = False\n',
    f'{TRANSCRIPT}[overtaken_bytes]',
    'overtaken_bytes',
  ),
  fault(
    'fetch of an earlier session fails for the donor of now',
    'diloco/protocol/learner/bootstrap.py',
    '  if event.state == core.state.fetching:\n',
    '  if core.state.seeking:\n',
    f'{TRANSCRIPT}[donor_of_an_earlier_session]',
    'donor_of_an_earlier_session',
  ),
  fault(
    'answers end with any session',
    'diloco/protocol/syncer/recovery.py',
    '      if state.is_current(*each) and state.members[each[0]].ready\n',
    '      if False\n',
    f'{TRANSCRIPT}[answers_stand]',
    'answers_stand',
  ),
  fault(
    'one ends the run for all',
    'diloco/protocol/syncer/collecting.py',
    '  return bool(state.were_live) and state.were_live <= state.members.live',
    '  return True',
    f'{TRANSCRIPT}[finish_after_a_lost_ledger]',
    'finish_after_a_lost_ledger',
  ),
  # Recovery -------------------------------------------------------------------
  fault(
    'lost version that is here',
    'diloco/protocol/syncer/recovery.py',
    '  if version < lost.version and _holders(state, p, lost, lost.version):',
    '  if False:',
    f'{TRANSCRIPT}[fragment_lost_then_brought]',
    'fragment_lost_then_brought',
  ),
  fault(
    'checker with a stale CRC',
    'diloco/simulator/observer.py',
    '    self._ledger_crcs[fragment] = version, crc\n',
    '',
    f'{SEED}[5003807]',
    'recovered other bytes',
  ),
  # Donors ---------------------------------------------------------------------
  fault(
    'donors of another partition',
    'diloco/protocol/syncer/bootstrap.py',
    '  if donor.partition == newcomer.partition:\n',
    '  if True:\n',
    f'{TRANSCRIPT}[donors_of_several_hosts]',
    'donors_of_several_hosts',
  ),
  fault(
    'all served at once',
    'diloco/protocol/syncer/bootstrap.py',
    '  return {x.donor for x in state.members.values() if x.donor is not None}',
    '  return set()',
    'tests/simulator/test_mass_bootstrap.py'
    '::test_seven_of_eight_are_back_with_one_copy_out_of_each_donor',
    'assert|Violation',
  ),
  fault(
    'state taken before all hosts have it',
    'diloco/learner/transfers.py',
    '        fetched = self._host.fetch(orders[0])\n      self._host.adopt(',
    '        fetched = self._host.fetch(orders[0])\n        self._host.adopt(',
    f'{FETCHED}::test_a_donor_that_loses_a_host_in_mid_pull_gives_nothing[1]',
    'assert',
  ),
  fault(
    'hosts not told of a failed fetch',
    'diloco/learner/transfers.py',
    '      self._hosts.end_fetch(taken=False)\n',
    '',
    f'{FETCHED}::test_a_donor_that_loses_a_host_in_mid_pull_gives_nothing[0]',
    'assert',
  ),
  # Those that leave -----------------------------------------------------------
  fault(
    'last offer left behind',
    'diloco/protocol/syncer/closing.py',
    '    pulls.take_last_offers(state, round_)\n',
    '',
    f'{TRANSCRIPT}[leaves_while_pulled]',
    'leaves_while_pulled',
  ),
  fault(
    'leaves before the outcome',
    'diloco/protocol/learner/leaving.py',
    '  elif not goes or _awaits_outcome(core):',
    '  elif not goes:',
    f'{TRANSCRIPT}[last_steps]',
    'last_steps',
  ),
  fault(
    'cut off and trains for ever',
    'diloco/protocol/learner/leaving.py',
    '  if state.connected or state.global_step < core.config.total_steps:',
    '  if True:',
    f'{TRANSCRIPT}[learner_cut_off_at_the_end]',
    'learner_cut_off_at_the_end',
  ),
)
