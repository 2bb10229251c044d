# SPDX-License-Identifier: Apache-2.0
"""The chips and GPUs of one machine, for the processes of a run on it.

found  which there are, and what lets a process see some of them
deal   which process of a run gets which
"""
