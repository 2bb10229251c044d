# SPDX-License-Identifier: Apache-2.0
"""Trains many learners with real gradients in one process, in simulated
time.
"""
