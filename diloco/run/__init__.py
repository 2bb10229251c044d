# SPDX-License-Identifier: Apache-2.0
"""Code that the processes of a run share.

Start with `spec`: all that follows from a configuration alone, the same in
every process: layout, codecs, schedule, model, data.

  spec           `RunSpec` of a run, and a user's own model
  payload_parts  what of a fragment a host holds; payloads in parts, one a
                 shard of the syncer; contributions, encoded and checked
  event_log    event logs: what a line can say; writes and reads them
  environment    what of a machine decides about bits
  step_profiler  traces of inner steps by jax.profiler, and their MFU
  heldout        loss on held-out text
  on_devices     a model on the devices of a process that does not train it
  bind_policy       refuses to listen where strangers could connect
  allocator      one heap for all threads, which keeps what they free
  logs           log lines, as text or JSON
  command        runs the commands that take a training configuration
  threads        a worker thread, an inbox

Nothing is re-exported: commands without jax use `event_log`.
"""
