# SPDX-License-Identifier: Apache-2.0
"""Package metadata; tool settings stand in pyproject.toml."""

import pathlib
import re
import zlib

import setuptools

HERE = pathlib.Path(__file__).parent
VERSION = re.search(
  r"^__version__ = '(.+)'$",
  (HERE / 'diloco' / '__init__.py').read_text(),
  re.MULTILINE,
).group(1)

# Lower bounds are versions that the suite has run on. Python 3.11 stops at
# jax 0.10.2; Python 3.12 and later take the newest.
RUNTIME = [
  'absl-py>=1.4',
  'array_record>=0.8.6',
  'etils[epath]>=1.15',
  'flax>=0.12.8',
  'grain>=0.2.18',
  'grpcio>=1.80',
  'jax>=0.10.2',
  'ml_collections>=1.1.0',
  'msgpack>=1.1',
  'numpy>=2.0',
  'optax>=0.2.8',
  'orbax-checkpoint>=0.12.8',
  'prometheus_client>=0.21',
  'protobuf>=5.28',
  'rich>=13',
  'scipy>=1.13',
  'tensorboardX>=2.6',
]
DATA = [
  'jinja2>=3.1',
  'pyarrow>=26',
  'sentencepiece>=0.2.3',
  'tokenizers>=0.23',
  'zstandard>=0.25',
]
GCS = ['etils[epath-gcs]']  # Paths such as gs://bucket/folder.
PLOT = ['matplotlib>=3.9']
WANDB = ['wandb>=0.31']
EXPORT = ['safetensors>=0.8']
LAUNCH = ['pyyaml>=6']
NOTEBOOKS = [*PLOT, 'ipykernel>=6.29', 'nbclient>=0.10', 'nbformat>=5.10']
TEST = [
  *DATA,
  *EXPORT,
  *LAUNCH,
  *NOTEBOOKS,
  *WANDB,
  'kubeflow-trainer-api>=2.3',  # Schemas of Kubernetes, for what is rendered.
  'kubernetes-validate>=1.37',
  'psutil>=5.9',
  'pytest>=8',
  'pytest-timeout>=2.3',
  'pytest-xdist>=3.8',
]
# A trainer of others, for one test of `Learner`, and lower bounds without which
# pip looks for versions of its cloud packages for minutes.
FOREIGN = [
  'kauldron>=1.4.2,<1.5',
  'google-api-core>=2.44',
  'google-cloud-aiplatform>=2.7',
  'google-cloud-bigquery>=3.20',
  'protobuf<7',
  'xmanager>=0.8.5',
  'pytest>=8',
  'pytest-timeout>=2.3',
]
# Without a compiler the numpy code runs, with the same bits and more slowly. No
# option may change what a float operation gives.
SOURCE = 'diloco/numerics/blocks.c'
BLOCKS = setuptools.Extension(
  'diloco.numerics._blocks',
  [SOURCE],
  define_macros=[
    ('SOURCE_CRC', f'{zlib.crc32((HERE / SOURCE).read_bytes())}u')
  ],
  extra_compile_args=[
    *('-O3', '-ffp-contract=off', '-fno-fast-math'),
    *('-fno-math-errno', '-fno-trapping-math'),
  ],
  optional=True,
)
BUILD = ['pip', 'setuptools>=77']  # A test makes the wheel, without a network.

setuptools.setup(
  name='diloco',
  version=VERSION,
  description='Decoupled DiLoCo in JAX: pre-training on machines that fail.',
  long_description=(HERE / 'README.md').read_text(),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  author='The authors of diloco',
  project_urls={'Paper': 'https://arxiv.org/abs/2604.21428'},
  python_requires='>=3.11',
  packages=[
    *setuptools.find_packages(include=['diloco', 'diloco.*']),
    *(
      f'diloco.{name}'
      for name in setuptools.find_packages(
        include=['launch', 'launch.*', 'experiments']
      )
    ),
  ],
  # In a checkout they stand beside diloco; installed, they are parts of it.
  package_dir={'diloco.launch': 'launch', 'diloco.experiments': 'experiments'},
  package_data={
    'diloco': [
      'py.typed',
      'numerics/blocks.c',
      'protocol/README.md',
      'pages/page.html',
      'sizing/host_speeds.json',
      'fleets/pauses.json',
    ],
    'diloco.launch': [
      'Dockerfile',
      'README.md',
      'backends/gke.yaml',
      'backends/*.sh',
    ],
    'diloco.experiments': ['README.md', 'records/*', 'tasks/*'],
  },
  ext_modules=[BLOCKS],
  entry_points={'console_scripts': ['diloco=diloco.__main__:main']},
  install_requires=RUNTIME,
  extras_require={
    'tpu': ['jax[tpu]', *GCS],
    'cuda12': ['jax[cuda12]'],
    'cuda13': ['jax[cuda13]'],
    'data': DATA,
    'gcs': GCS,
    'export': EXPORT,
    'launch': LAUNCH,
    'plot': PLOT,
    'wandb': WANDB,
    'notebooks': NOTEBOOKS,
    'test': TEST,
    'foreign': FOREIGN,
    'dev': [*TEST, *BUILD, 'ruff>=0.17'],
  },
  classifiers=[
    'Development Status :: 3 - Alpha',
    'Intended Audience :: Science/Research',
    'Operating System :: POSIX :: Linux',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
)
