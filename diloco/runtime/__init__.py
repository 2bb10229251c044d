# SPDX-License-Identifier: Apache-2.0
"""Runs the state machines in real processes: clocks, threads, devices,
sockets.
"""
