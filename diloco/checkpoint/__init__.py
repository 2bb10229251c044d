# SPDX-License-Identifier: Apache-2.0
"""What is written to disk to be read by a later process."""
