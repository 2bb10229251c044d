# SPDX-License-Identifier: Apache-2.0
"""Questions to the simulator: a configuration in, a report out.

`python -m diloco.simulate` runs the study that a configuration names:
`goodput`, `bandwidth`, `heterogeneous` or `scavenging`, each a module with a
function `report`: runs become records, records become tables. `study` has what
they share.

Nothing here imports jax.
"""
