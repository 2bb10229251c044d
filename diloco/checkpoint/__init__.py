# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: state that a process writes for a later one.

Start with `store`: a folder of checkpoints, written beside the training, of
which the newest whole one is taken.

  store            keeps the newest, skips what is broken
  folders          checkpoints by step, on a disk or in a bucket
  orbax_files      one checkpoint of Orbax: a tree of arrays and a text
  arrays           trees as named arrays, and the CRCs of their boxes
  learner_records  what a restarted learner goes on from
  syncer_records   what a restarted syncer goes on from: ledger and Θ
  parameters       the final parameters, an Orbax checkpoint
  safetensors_files  the same for other tools; needs the package safetensors
"""
