# SPDX-License-Identifier: Apache-2.0
"""The protocol as two pure state machines: events go in, effects come out.

`syncer.py` is the paper's Alg. 2, `learner.py` its Alg. 1 (arXiv 2604.21428);
`README.md` beside this file has the words, the invariants and where to begin.
"""
