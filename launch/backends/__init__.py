# SPDX-License-Identifier: Apache-2.0
"""Back ends that start a run on other machines.

One class a back end, in a module of its own, which starts a
`launch.job.JobSpec`, adds and removes learners. `launch.main` knows them by
`BACKENDS` alone.

  base               what they have in common; command lines with addresses
  gke                JobSets of Kubernetes, and what stands beside a role
  slurm              a job for the syncer, an array of learners
  queued_resources   TPU VMs: gcloud commands; asks again for lost slices
"""

from launch.backends.gke import Gke
from launch.backends.queued_resources import QueuedResources
from launch.backends.slurm import Slurm

# What --to calls them.
BACKENDS = {'gke': Gke, 'queued_resources': QueuedResources, 'slurm': Slurm}
