# SPDX-License-Identifier: Apache-2.0
"""Measures training over shaped links: python -m launch.netbench …

Real processes, each in a network namespace of its own, and beside each figure
what the simulator predicts for it.

  __main__           the command
  links              namespaces, links with a token bucket, their counters
  delayed_wires      links that delay each packet, carried by a process
  net_systems        what is compared: settings, roles, what is predicted
  all_reduce_worker  a worker of the data-parallel computation
  process_run        a run's processes, started, followed and ended
  system_run         one system's processes, followed over all rates
  studies            two sites, unequal learners, visitors: runs and figures
  stages             where these take place: on processes, in the simulator
  link_tables        the tables, and the bandwidth for a utilisation
"""
