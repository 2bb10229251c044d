# SPDX-License-Identifier: Apache-2.0
"""Objects of Kubernetes as `launch.backends.gke` renders them."""

import kubernetes_validate
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import (
  JobsetV1alpha2JobSet,
)

from launch.backends import gke
from tests.backends.launch_values import a_launch

KUBERNETES = '1.31'


def container_launch(*arguments, **changes):
  return a_launch(
    *arguments, workdir='/workdir', image='example.org/diloco:1', **changes
  )


def objects(whole, **changes) -> dict[str, dict]:
  """Kind/name -> object."""
  options = gke.GkeOptions(**changes)
  found = gke.manifests(whole, options)
  return {f'{each["kind"]}/{each["metadata"]["name"]}': each for each in found}


def check_schema(manifest: dict) -> None:
  """Checks against the schema of its kind; an unknown field is an error."""
  if manifest['kind'] != 'JobSet':
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    return
  read = JobsetV1alpha2JobSet.from_dict(manifest)
  assert read.to_dict() == manifest, 'a field that JobSet does not know'
  # The models check names and types of fields; the schema of a Job knows
  # also which values they may have.
  for replicated in manifest['spec']['replicatedJobs']:
    job = {
      'apiVersion': 'batch/v1',
      'kind': 'Job',
      'metadata': {'name': replicated['name']},
      **replicated['template'],
    }
    kubernetes_validate.validate(job, KUBERNETES, strict=True)


def job_of(manifest: dict) -> dict:
  return manifest['spec']['replicatedJobs'][0]['template']['spec']


def pod_of(manifest: dict) -> dict:
  return job_of(manifest)['template']['spec']
