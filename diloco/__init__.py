# SPDX-License-Identifier: Apache-2.0
"""Decoupled DiLoCo in JAX: pre-training on machines that fail.

It implements *Decoupled DiLoCo for Resilient Distributed Pre-training*
(Douillard et al., 2026, arXiv 2604.21428). Wherever this repository says "the
paper", or cites an algorithm (Alg. 1 is the learner, Alg. 2 the syncer), an
equation, a table or a figure without a name, it means that one. What the paper
leaves open, and how it was decided here, stands in `docs/design.md` and
`diloco/protocol/README.md`.
"""

__version__ = '0.1.0'
