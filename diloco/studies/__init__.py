# SPDX-License-Identifier: Apache-2.0
"""Questions to the simulator: a configuration in, a report out."""
