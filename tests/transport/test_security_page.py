# SPDX-License-Identifier: Apache-2.0
"""The lines of docs/security.md are those that made the tests' certificates."""

import re

from diloco.config import flags
from tests.transport import credentials

PAGE = credentials.CERTIFICATES.parents[2] / 'docs' / 'security.md'


def openssl_lines(path) -> list[str]:
  text = re.sub(r'-days (\d+|"\$DAYS")', '-days N', path.read_text())
  return re.findall(r'^ +(openssl .*)$', text, re.MULTILINE)


def test_the_page_makes_certificates_as_the_tests_do():
  told = openssl_lines(PAGE)
  assert len(told) == 4
  assert told == openssl_lines(credentials.CERTIFICATES / 'make.sh')


def test_the_page_names_the_flags_that_there_are():
  named = set(re.findall(r'--([a-z_]+)\b', PAGE.read_text()))
  known = {*flags.ACCESS_FILES, *flags.ACCESS_VOUCHED}
  assert known <= named
