# SPDX-License-Identifier: Apache-2.0
"""The syncer: owns Θ and the pace. `python -m diloco.syncer`.

Start with `server`: one thread owns the machine of `diloco.protocol.syncer`
and performs its effects; shards do what is to be done with bytes.

  __main__           flags to a running syncer
  server             events in, effects performed; messages in their order
  outer_state        Θ, the outer optimizer, what is sent of them
  shard              the bytes of one shard
  shard_coordinator  all shards as one: who is here, jobs, orders, answers
  shard_server       a shard in a process of its own (`diloco.syncer_shard`)
  storage            ledger and checkpoints
  results            the final Θ and the summary
  stats              counts for `status.json`, `summary.json` and the event log
"""
