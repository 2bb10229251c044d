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
Hardware: 1 CPU core. Wall time: 22 s, most of it the real machines.
Result: for 90 % at D = 2, data-parallel 104 Gbit/s (closed form 103.6),
Decoupled DiLoCo 1.7 in bf16 and 0.43 at 4 bits with the embedding, 24.5 % of
the model, in one piece (the paper has 104, 1.7 and 0.43); 0.39 with its codec
and the embedding split, as here. Data-parallel needs 60 and 240 times as much
(paper: 61, 242, and 236 at D = 8). The real machines step 99.6 % of the
time on every link; with int4 they close 80 % of the due rounds at 0.43 Gbit/s
and all at 0.86.
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
