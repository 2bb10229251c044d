# SPDX-License-Identifier: Apache-2.0
"""Real processes: clocks, threads, devices and sockets around the machines."""
