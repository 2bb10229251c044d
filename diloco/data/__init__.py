# SPDX-License-Identifier: Apache-2.0
"""Training data: corpora, tokenizers, and batches by position."""
