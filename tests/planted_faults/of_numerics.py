# SPDX-License-Identifier: Apache-2.0
"""Faults at the edges of the numerics, the data and the configuration."""

from tests.planted_faults.fault import fault

MERGE = 'tests/numerics/test_numerics_merge.py'
OUTER = 'tests/numerics/test_numerics_outer.py'
PIPELINE = 'tests/data/test_pipeline.py'

FAULTS = (
  fault(
    'parameter of no axes',
    'diloco/run/spec.py',
    "{name: np.asarray(x, order='C') for",
    '{name: np.ascontiguousarray(x) for',
    'tests/lab/test_own_model.py::test_a_parameter_may_be_one_number',
    r'must be float32 \(\)',
  ),
  fault(
    'parameter of no axes on hosts',
    'diloco/run/host_slices.py',
    "np.asarray(whole[box.piece.name][box.index], order='C')",
    'np.ascontiguousarray(whole[box.piece.name][box.index])',
    'tests/lab/test_own_model.py::test_hosts_hold_single_numbers_as_they_are',
    'assert',
  ),
  fault(
    'batch of one row',
    'diloco/data/pipeline.py',
    '  if batch == 1:',
    '  if batch == 0:',
    f'{PIPELINE}::test_a_batch_of_one_row_is_read_as_any',
    'OverflowError',
  ),
  fault(
    'RDA of slices of rows',
    'diloco/config/run_config.py',
    '    RULES[merge.embedding].of_whole_tensors\n    and EMBED',
    '    False\n    and EMBED',
    'tests/config/test_build_config.py::test_rda_is_of_whole_tables',
    'DID NOT RAISE',
  ),
  fault(
    'own schedule begins anew',
    'diloco/run/spec.py',
    '    return PROGRESS[self.config.inner.progress](global_step, position)',
    '    return global_step',
    'tests/lab/test_lab_training.py::test_who_returns_goes_on_with_its_schedule',
    'assert',
  ),
  fault(
    'recorded rate of the lab follows t',
    'diloco/lab/decoupled.py',
    '        names.LEARNING_RATE: self._schedule(progress),',
    '        names.LEARNING_RATE: self._schedule(process.stepped_at),',
    'tests/lab/test_lab_training.py::test_who_returns_goes_on_with_its_schedule',
    'assert',
  ),
  fault(
    'recorded rate of a learner follows t',
    'diloco/learner/train_loop.py',
    'self._position, global_step, lr, self._waited_s',
    'self._position, global_step, self._schedule(global_step), self._waited_s',
    'tests/learner/test_own_schedule.py::test_the_recorded_rate_is_that_of_the_step',
    'assert',
  ),
  fault(
    'one element votes by its sign',
    'diloco/numerics/merge.py',
    '  if vs[0].size == 1:\n',
    '  if False:\n',
    f'{MERGE}::test_of_one_element_rda_is_the_mean',
    'Arrays are not equal|assert',
  ),
  fault(
    'outer step is compiled',
    'diloco/numerics/outer.py',
    '  with jax.disable_jit():\n    update, state = optimizer.update(\n',
    '  if True:\n    update, state = jax.jit(optimizer.update)(\n',
    f'{OUTER}::test_products_and_sums_are_rounded_one_after_the_other',
    'Arrays are not equal',
  ),
  fault(
    'array of a wrong dtype is encoded',
    'diloco/numerics/payload.py',
    '  if array.dtype != np.float32 or array.shape != piece.shape:\n',
    '  if False:\n',
    'tests/numerics/test_numerics_payload.py'
    '::test_wrong_arrays_are_refused_by_a_named_error',
    'DID NOT RAISE|Error',
  ),
  fault(
    'too short a text for a batch',
    'diloco/run/spec.py',
    'text_windows.check_shards(',
    '(lambda *_: None)(',
    'tests/processes/test_process_bad_starts.py::test_text_is_too_short'
    '[5000-one batch needs 4-learner]',
    'assert',
  ),
  fault(
    'too short a text for the evaluation',
    'diloco/run/spec.py',
    '  text_windows.heldout_shape(\n',
    '  lambda: text_windows.heldout_shape(\n',
    'tests/processes/test_process_bad_starts.py::test_text_is_too_short'
    '[700-held-out tokens hold no window of-learner]',
    'assert|not within',
  ),
  fault(
    'launcher does not look for the data',
    'launch/preflight.py',
    '    data_section.missing_paths,\n',
    '    lambda data: (),\n',
    'tests/launch/test_local_main.py::test_missing_data_end_in_one_line[text]',
    'assert|Error',
  ),
)
