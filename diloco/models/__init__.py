# SPDX-License-Identifier: Apache-2.0
"""What is trained: a model is a pair of functions on plain pytrees."""
