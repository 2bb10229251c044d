# SPDX-License-Identifier: Apache-2.0
"""A page of a run while it goes on: `python -m diloco.watch RUN`.

Start with `followed_run`: what is known of the run, read as its files grow.

  __main__      flags to a page that is served or written
  followed_run  reads a run's folder, each line once
  tape_counts   what the tape alone tells, of a run of the lab
  live_page     the page: `live_page.html` with the run's state in it
  watch_server  serves page and state over HTTP
"""
