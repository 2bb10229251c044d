# SPDX-License-Identifier: Apache-2.0
"""The functions of `import diloco`, and the run that they return.

The commands `lab`, `simulate` and `plan` are short users of it; docs/api.md
lists every name.

  training    train, lab: a run from its configuration to its end
  run         a run that was made, or goes on, as a value
  questions   simulate, plan: what a fleet or a link would give
"""
