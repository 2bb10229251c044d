# SPDX-License-Identifier: Apache-2.0
"""All planted faults."""

from tests.planted_faults import of_numerics, of_processes, of_protocol

FAULTS = (
  *of_protocol.FAULTS,
  *of_processes.FAULTS,
  *of_numerics.FAULTS,
)
