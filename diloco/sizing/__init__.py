# SPDX-License-Identifier: Apache-2.0
"""Estimates a learner's need of chips, hosts and links, without a chip.

planner         a run by arithmetic, and as text; free of jax
rounds          those of unlike learners, simulated; free of jax
memory          hosts by formula, the syncer's machine; free of jax
estimate        one learner on one slice, compiled; and as text
"""
