# SPDX-License-Identifier: Apache-2.0
"""The tests' own certificates and tokens, as a user would hold them."""

import pathlib
import shutil

from diloco.transport import auth

CERTIFICATES = pathlib.Path(__file__).parent / 'certificates'
NAME = 'diloco'  # In every certificate, beside 127.0.0.1.


def copied(root: pathlib.Path, whose: str = 'ours') -> pathlib.Path:
  """A private copy: git keeps no permissions, and keys must have them."""
  folder = shutil.copytree(CERTIFICATES / whose, root / whose)
  for secret in ('run.key', 'run.token'):
    (folder / secret).chmod(0o600)
  return folder


def tls_files(folder: pathlib.Path, **changes) -> auth.AccessFiles:
  """Returns the files of mTLS; `changes` are other fields."""
  given = {
    'tls_ca': str(folder / 'ca.pem'),
    'tls_cert': str(folder / 'run.pem'),
    'tls_key': str(folder / 'run.key'),
  }
  return auth.AccessFiles(**{**given, **changes})


def read(folder: pathlib.Path, **changes) -> auth.Access:
  """Reads what a process with these files has that serves and connects."""
  files = tls_files(folder, **changes)
  return auth.read(files, serves=True, connects=True)
