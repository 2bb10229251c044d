# SPDX-License-Identifier: Apache-2.0
"""Decoupled DiLoCo in JAX: pre-training on machines that fail."""

__version__ = '0.1.0'
