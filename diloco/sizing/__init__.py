# SPDX-License-Identifier: Apache-2.0
"""Estimates what a learner needs of chips, hosts and links, without a chip."""
