# SPDX-License-Identifier: Apache-2.0
"""Faults of processes: sessions, the disk, clocks, the end of a run, ports."""

from tests.planted_faults.fault import Edit, Fault, fault

RECORDS = 'tests/checkpoint/test_syncer_records.py'
LINES = 'tests/metrics/test_jsonl.py'
CLOSES = 'tests/syncer/test_closes_on_disk.py'
DISK = 'tests/survival/test_process_disk.py'
SIEGE = 'tests/siege/test_transport_siege.py'
LARGEST = 'tests/syncer/test_largest_messages.py'

FAULTS = (
  # Sessions -------------------------------------------------------------------
  fault(
    'sessions bounded by 64',
    'diloco/config/limits.py',
    '  sessions = min(max(wanted, SESSIONS_LEAST), SESSIONS_MAX)',
    '  sessions = SESSIONS_LEAST',
    'tests/syncer/test_many_sessions.py::test_eighty_learners_are_served',
    'full|64 sessions|Empty',
  ),
  # The ledger -----------------------------------------------------------------
  fault(
    'checkpoint without its ledger',
    'diloco/checkpoint/syncer_records.py',
    '    if ledger is not None:\n',
    '    if False:\n',
    f'{RECORDS}::test_a_checkpoint_newer_than_the_ledger_is_gone_on_from',
    'assert',
  ),
  fault(
    'ledger without a checksum',
    'diloco/metrics/files.py',
    '  if seal(text) != data:\n',
    '  if False:\n',
    f'{RECORDS}::test_one_changed_bit_of_a_ledger_is_never_another_run',
    'assert|Error',
  ),
  fault(
    'previous ledger is not kept',
    'diloco/metrics/files.py',
    '    if previous is not None and path.exists():\n',
    '    if False:\n',
    f'{RECORDS}'
    '::test_a_crash_between_two_names_of_the_ledger_goes_on_from_the_last',
    'assert',
  ),
  fault(
    'tape line without a checksum',
    'diloco/run/event_log.py',
    'self._lines.append(files.seal(json.dumps(line).encode()))',
    'self._lines.append(json.dumps(line).encode())',
    'tests/replay/test_timeline.py::test_a_changed_digit_of_a_tape_is_noticed',
    'DID NOT RAISE',
  ),
  fault(
    'status without a checksum',
    'diloco/metrics/status.py',
    "files.replace(path, files.seal(text.encode()) + b'\\n')",
    "files.replace(path, text.encode() + b'\\n')",
    'tests/metrics/test_metric_files.py'
    '::test_a_changed_digit_of_a_status_is_malformed',
    'DID NOT RAISE',
  ),
  fault(
    'ledger not forced to the disk',
    'diloco/metrics/files.py',
    '        os.fsync(file.fileno())\n',
    '',
    f'{CLOSES}::test_the_ledger_and_its_name_are_forced_to_the_disk[True]',
    'assert',
  ),
  fault(
    'name not forced to the disk',
    'diloco/metrics/files.py',
    '      os.fsync(folder)\n',
    '      pass\n',
    f'{CLOSES}::test_the_ledger_and_its_name_are_forced_to_the_disk[True]',
    'assert',
  ),
  fault(
    'told before the ledger has it',
    'diloco/syncer/server.py',
    'self._disk.keep(self._machine.ledger(), self._run_crcs(), published)',
    'pass',
    f'{CLOSES}::test_the_ledger_and_its_name_are_forced_to_the_disk[True]',
    'assert',
  ),
  fault(
    'broken line stops a process',
    'diloco/metrics/jsonl.py',
    "      except CorruptLine as error:\n        logging.error('a line is",
    "      except OSError as error:\n        logging.error('a line is",
    f'{LINES}::test_a_broken_line_stops_only_those_that_ask_for_all',
    'CorruptLine',
  ),
  # The result -----------------------------------------------------------------
  Fault(
    'result that is not the run',
    (
      Edit(
        'diloco/syncer/results.py',
        '    if found != tuple(crcs):\n',
        '    if False:\n',
      ),
      Edit(
        'diloco/syncer/server.py',
        '    while self._machine.lost:\n',
        '    while False:\n',
      ),
    ),
    f'{DISK}::test_what_nobody_has_is_refused_and_nothing_written',
    'assert 0 == 1',
  ),
  fault(
    'learners let go before the result',
    'diloco/syncer/server.py',
    '    if isinstance(message, messages.Done) and self._unwritten:\n',
    '    if False:\n',
    f'{DISK}::test_a_damaged_last_checkpoint_is_regained_from_learners',
    'no parameters at',
  ),
  # A full disk ----------------------------------------------------------------
  fault(
    'full disk ends the syncer',
    'diloco/syncer/storage.py',
    '      except OSError as error:\n        if not waits:',
    '      except KeyError as error:\n        if not waits:',
    f'{DISK}::test_a_full_disk_ends_no_process',
    'assert',
  ),
  fault(
    'full disk ends a learner',
    'diloco/metrics/jsonl.py',
    '    except OSError as error:\n      self._abandon()',
    '    except KeyError as error:\n      self._abandon()',
    f'{DISK}::test_a_full_disk_ends_no_process',
    'assert',
  ),
  fault(
    'full disk keeps a syncer from starting',
    'diloco/checkpoint/syncer_records.py',
    'with contextlib.suppress(OSError):  #',
    'with contextlib.nullcontext():  #',
    f'{DISK}::test_a_syncer_that_starts_on_a_full_disk_waits_for_it',
    'assert',
  ),
  fault(
    'half a line stays',
    'diloco/metrics/jsonl.py',
    '    except OSError as error:\n      self._abandon()',
    '    except OSError as error:\n      pass',
    f'{LINES}::test_a_full_disk_holds_lines_back_and_keeps_them_whole',
    'assert|CorruptLine',
  ),
  fault(
    'leftover of a full disk',
    'diloco/metrics/workdir.py',
    r"r'(\.\d+(\.tmp)?|\.orbax-checkpoint-tmp.*)$'",
    r"r'(\.\d+|\.orbax-checkpoint-tmp.*)$'",
    'tests/launch/test_local_main.py'
    '::test_what_a_full_disk_leaves_behind_keeps_no_run_from_going_on',
    'ConfigError',
  ),
  # Clocks ---------------------------------------------------------------------
  fault(
    'clock set back is refused',
    'diloco/protocol/syncer/sessions.py',
    '    newest = account.incarnation if old else -1\n',
    '    newest = -1\n',
    'tests/protocol/test_transcripts.py::test_transcript[older_incarnation]',
    'older_incarnation',
  ),
  # The end of a run -----------------------------------------------------------
  fault(
    'cut-off learner goes on',
    'diloco/protocol/learner/leaving.py',
    '  if state.connected or state.global_step < core.config.total_steps:\n',
    '  if True:\n',
    'tests/survival/test_process_cut_off.py::test_it_leaves_with_a_code_of_its_own',
    'not within',
  ),
  # Commands -------------------------------------------------------------------
  fault(
    'second syncer in one folder',
    'diloco/checkpoint/syncer_records.py',
    '        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n',
    '',
    f'{RECORDS}::test_a_folder_is_one_process_s',
    'DID NOT RAISE',
  ),
  fault(
    'killed before its time',
    'launch/supervisor.py',
    'group.role.leave_s if deadline_s is None else deadline_s',
    '0.1',
    'tests/launch/test_supervisor.py'
    '::test_each_role_has_as_long_to_leave_as_it_was_promised',
    'assert',
  ),
  fault(
    'ten seconds for every role',
    'launch/program.py',
    'LEARNER_LEAVE_S = 30.0',
    'LEARNER_LEAVE_S = 10.0',
    'tests/launch/test_supervisor.py'
    '::test_the_roles_of_a_run_have_as_long_as_they_promise',
    'assert',
  ),
  fault(
    'shard refuses --log_json',
    'diloco/syncer_shard.py',
    "    role='syncer_shard',\n",
    '',
    'tests/launch/test_local_main.py'
    '::test_two_shards_take_the_flag_of_how_all_log',
    'assert|Error',
  ),
  fault(
    'brackets are markup',
    'launch/progress.py',
    '[rich.text.Text(each) for each in headlines(status, times, width)]',
    '[*headlines(status, times, width)]',
    'tests/launch/test_table_and_report.py'
    '::test_brackets_in_a_run_s_name_are_no_markup',
    'MarkupError|assert',
  ),
  # Files that grow ------------------------------------------------------------
  fault(
    'whole tape in memory',
    'diloco/metrics/jsonl.py',
    '      size = min(BLOCK_BYTES, start)\n',
    '      size = start\n',
    f'{LINES}::test_the_newest_record_of_a_long_file_takes_little_memory',
    'assert',
  ),
  fault(
    'tape without parts',
    'diloco/metrics/jsonl.py',
    '    if self._bytes and self._bytes + len(line) > self._part_bytes:\n',
    '    if False:\n',
    f'{LINES}::test_all_parts_are_read_and_only_their_size_is_bounded',
    'assert',
  ),
  fault(
    'log without an end',
    'launch/supervisor.py',
    '    if not path.exists() or path.stat().st_size <= bytes_max:\n',
    '    if True:\n',
    'tests/launch/test_supervisor.py'
    '::test_a_log_that_has_grown_is_cut_and_kept_beside',
    'assert',
  ),
  # Ports ----------------------------------------------------------------------
  fault(
    'coordinator on all addresses',
    'diloco/learner/hosts/process_group.py',
    'coordinator_bind_address=met.jax_at,',
    '',
    'tests/survival/test_process_strangers.py'
    '::test_hosts_listen_at_the_address_that_they_were_given',
    'assert',
  ),
  Fault(
    'secret told to the world of JAX',
    (
      Edit(
        'diloco/learner/hosts/process_group.py',
        '    _spread(list(listener.address))\n',
        '    _spread([*listener.address, self.secret.hex()])\n',
      ),
      Edit(
        'diloco/learner/hosts/process_group.py',
        '    host, port = _spread(None)\n',
        '    host, port, _ = _spread(None)\n',
      ),
    ),
    'tests/survival/test_process_strangers.py'
    '::test_a_stranger_in_host_1_s_place_gets_nothing',
    'heard 3 words',
  ),
  fault(
    'host without the secret',
    'diloco/transport/host_channel.py',
    '      self._refused += 1\n      connection.close()',
    '      found.put(connection)\n      return',
    'tests/transport/test_transport_group.py'
    '::test_who_lacks_the_secret_is_not_let_in',
    'Error',
  ),
  fault(
    'idle sockets of the data plane',
    'diloco/transport/control_channel.py',
    "        ('grpc.max_connection_idle_ms', int(IDLE_S * 1000)),\n",
    '',
    f'{SIEGE}::test_siege_of_the_data_plane_by_idle_connections',
    'TimeoutError|timed out',
  ),
  fault(
    'idle sockets of the control plane',
    'diloco/transport/control_channel.py',
    "        ('grpc.max_connection_idle_ms', int(IDLE_S * 1000)),\n",
    '',
    f'{SIEGE}::test_siege_of_the_control_plane_by_idle_connections',
    'TimeoutError|timed out',
  ),
  # Checkpoints ----------------------------------------------------------------
  fault(
    'θ copied in the train loop to be saved',
    'diloco/learner/held_state.py',
    '    return HeldState(params, state, release)\n',
    '    release()\n    return HeldState(params, state)\n',
    'tests/checkpoint/test_held_state.py'
    '::test_the_loop_copies_nothing_where_it_saves',
    'assert',
  ),
  # Logs -----------------------------------------------------------------------
  fault(
    'a checkout named diloco owns its environment',
    'diloco/run/logs.py',
    '  if record.pathname.startswith(OURS):\n',
    "  if '/diloco/' in record.pathname:\n",
    'tests/run/test_logs.py'
    '::test_a_checkout_named_diloco_does_not_own_its_environment',
    'assert',
  ),
  # Signals --------------------------------------------------------------------
  fault(
    'a sweep goes on after Ctrl-C',
    'diloco/lab/sweep_runner.py',
    'pool.shutdown(wait=False, cancel_futures=True)',
    'pool.shutdown(wait=True)',
    'tests/lab/test_sweep_stopped.py'
    '::test_ctrl_c_ends_the_runs_and_begins_no_other',
    'assert',
  ),
  fault(
    'Ctrl-C leaves worker processes',
    'diloco/config/flags.py',
    '    child.terminate()\n',
    '    pass\n',
    'tests/lab/test_sweep_stopped.py'
    '::test_ctrl_c_of_a_command_is_no_traceback_and_leaves_no_process',
    'TimeoutExpired',
  ),
  fault(
    'two saves of one process are written at once',
    'diloco/checkpoint/store.py',
    '    with orbax_files.OPERATING:\n',
    '    if True:\n',
    'tests/checkpoint/test_saves_at_once.py'
    '::test_one_save_of_a_process_is_written_at_a_time',
    'two saves were written at once',
  ),
  fault(
    'a reader that has read enough is an error',
    'diloco/config/flags.py',
    '      if not pipe.poll(0):\n        raise',
    '      raise',
    'tests/replay/test_timeline.py'
    '::test_a_reader_that_has_read_enough_is_no_error',
    'Broken pipe',
  ),
  # Starts ---------------------------------------------------------------------
  fault(
    'an environment that was being cleared is not ours',
    'launch/environment.sh',
    ' &&\n    ! -f "$folder/.unfinished" ]]; then',
    ' ]]; then',
    'tests/run/test_environment_script.py'
    '::test_an_environment_interrupted_while_it_was_cleared_is_made_anew',
    'no virtual environment',
  ),
  fault(
    'training on keeps the old number of steps',
    'launch/train.py',
    "f'--steps={2 * total_steps}'",
    "f'--steps={total_steps}'",
    'tests/launch/test_train.py::test_the_next_commands_go_on_with_this_run',
    'assert',
  ),
  fault(
    'strangers keep descriptors',
    'diloco/monitoring/http_pages.py',
    '        request.shutdown(socket.SHUT_RDWR)',
    '        pass',
    'tests/watch/test_watch_server.py::test_a_header_that_drips_is_given_up',
    'timed out|TimeoutError',
  ),
  fault(
    'a broken status ends the launcher',
    'launch/local.py',
    '  except files.MalformedFile:  # A view of the run',
    '  except FileExistsError:  # A view of the run',
    'tests/launch/test_local_main.py::test_a_broken_status_decides_nothing',
    'MalformedFile',
  ),
  fault(
    'a syncer that resumes draws parameters',
    'diloco/syncer/storage.py',
    '      [self._model.template(p) for p in fragments]\n',
    '      [self._model.state(p) for p in fragments]\n',
    'tests/syncer/test_closes_on_disk.py'
    '::test_a_process_that_resumes_draws_no_parameters',
    'assert',
  ),
  fault(
    'shared objects are mapped before they are read',
    'diloco/checkpoint/orbax_files.py',
    "  read_shared_objects('tensorstore')\n",
    '',
    'tests/run/test_pulse.py'
    '::test_shared_objects_are_read_through_before_orbax_is_imported',
    'assert',
  ),
  fault(
    'a second formula of a figure',
    'diloco/monitoring/run_metrics.py',
    'figure.value(x) for each, x in labelled.items()}',
    'figure.value(x) and 2 * figure.value(x) for each, x in labelled.items()}',
    'tests/processes/test_process_run.py'
    '::test_every_surface_has_one_number_a_name',
    'assert',
  ),
  # Messages -------------------------------------------------------------------
  fault(
    'no room for an envelope',
    'diloco/transport/wire.py',
    'INCOMING_BYTES_MAX = MESSAGE_BYTES_MAX - ENVELOPE_BYTES',
    'INCOMING_BYTES_MAX = MESSAGE_BYTES_MAX',
    f'{LARGEST}::test_the_largest_donation_is_handed_on_or_refused[address]',
    'Error|Empty',
  ),
  fault(
    'figures that can not be sent on',
    'diloco/transport/wire.py',
    'INTS = range(-(1 << 62), 1 << 62)',
    'INTS = range(-(1 << 63), 1 << 64)',
    'tests/transport/test_transport_wire.py'
    '::test_wire_encode_refuses_our_own_mistakes',
    'DID NOT RAISE',
  ),
)
