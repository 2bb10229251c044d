# SPDX-License-Identifier: Apache-2.0
"""The arithmetic: fragments, codecs, merge, outer and inner step.

Formulas carry the symbols of the paper (arXiv 2604.21428); where a docstring
cites "Alg. 2" it is the paper's algorithm of the syncer.
"""
