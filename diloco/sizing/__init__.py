# SPDX-License-Identifier: Apache-2.0
"""What a learner takes of chips, hosts and links, before it has a chip."""
