# SPDX-License-Identifier: Apache-2.0
"""The protocol: two pure state machines, events in, effects out."""
