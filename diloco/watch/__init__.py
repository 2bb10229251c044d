# SPDX-License-Identifier: Apache-2.0
"""The page of runs and sweeps: `diloco watch RUN`, `diloco report RUN…`.

Start with `folders`: what is in a folder, and the page of it.

  __main__      flags to a page that is served or written
  folders       the page of one or several folders
  run_page      the page of runs
  sweep_page    the page of a sweep
  watch_server  serves page, status and metrics over HTTP
"""
