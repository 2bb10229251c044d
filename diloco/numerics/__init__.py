# SPDX-License-Identifier: Apache-2.0
"""The arithmetic: fragments, codecs, merge, outer and inner step."""
