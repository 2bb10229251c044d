# SPDX-License-Identifier: Apache-2.0
"""Options of the whole suite."""


def pytest_addoption(parser):
  parser.addoption(
    '--rewrite',
    action='store_true',
    help='write what the machines say now into the transcripts',
  )
