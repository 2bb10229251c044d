# SPDX-License-Identifier: Apache-2.0
"""A run made again from its event tapes. `python -m diloco.replay`.

Start with `replay.make_plan`: what has to be done again, from the tapes alone.

  __main__  a run's folder, opened; its machine, its end
  replay    what to do again, in which order; does it, and compares the bytes
  timeline  tapes as what happened when (`python -m diloco.tape`)
"""
