# SPDX-License-Identifier: Apache-2.0
"""What is learned from: corpora of bytes, and batches by their position."""
