# SPDX-License-Identifier: Apache-2.0
"""Back ends that start a run: TPU VMs, GKE, Slurm.

Start with `registry`: one class a back end, which starts a
`launch.job.JobSpec`, adds and removes learners.

  gke, manifest_text            JobSets of Kubernetes
  gke_sidecars                  what stands beside a role in its pod; probes
  slurm                         a job for the syncer, an array of learners
  queued_resources, startup     TPU VMs: gcloud commands, start-up scripts
  provisioner                   asks again for slices that were taken away
  dry_run                       what a launch would do, as text
  newcomers                     learners of a local run, added and removed
  command_lines                 a role's command, with its addresses
  commands                      runs the programs of the back ends
"""
