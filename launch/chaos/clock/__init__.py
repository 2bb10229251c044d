# SPDX-License-Identifier: Apache-2.0
"""A folder for PYTHONPATH: it gives a process a clock that can be set.

sitecustomize  Python imports it at its start
"""
