# SPDX-License-Identifier: Apache-2.0
"""What a run tells about itself: scalars, status, summary, goodput."""
