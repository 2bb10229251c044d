# SPDX-License-Identifier: Apache-2.0
"""Each process serves `/metrics` for Prometheus, and `/status`, if told to.

Start with `monitor`: one process and what it serves.

  monitor        what one process serves, beside its work, and the HTTP server
  monitor_flags  --metrics_bind, and the monitor that it asks for
"""
