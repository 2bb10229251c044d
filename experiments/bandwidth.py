# SPDX-License-Identifier: Apache-2.0
"""How much bandwidth between data centres keeps the accelerators busy?

A simulation of a model of 5 B parameters in 2 and in 8 data centres, with a
step of one second. For data-parallel, DiLoCo, streaming DiLoCo and Decoupled
DiLoCo it finds the bandwidth that 50, 75, 90, 95 and 99 % utilisation take, in
closed form, on the one link of `diloco/fleets/traffic.py`.
Then it runs the protocol's own machines at 0.1 to 3.4 Gbit/s.

Look at: the bandwidth that each system needs for 90 %, and the share of due
rounds that the machines close at each bandwidth.

Command: python -m diloco.simulate --config=experiments/bandwidth.py
Variants: bandwidth.py:quicktest, --config.study.steps_s='(0.1,5.0)',
  --config.study.datacentres='(3,64)', --config.network.embedding_share=0.0.
"""

from experiments import common


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = common.simulation('bandwidth')
  config.network.update(
    datacentres=2,  # Of the real machines.
    # In one piece. An inference: with about a quarter of the model the paper's
    # figures come out; they are not printed with what they assume.
    embedding_share=0.245,
  )
  if args.quicktest:
    config.study.update(gbps=(0.43,), seeds=1)
  return config
