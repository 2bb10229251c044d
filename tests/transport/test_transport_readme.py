# SPDX-License-Identifier: Apache-2.0
"""The README's lines for certificates are those that made the tests' own."""

import re

from diloco import flags
from tests.transport import credentials

README = credentials.CERTIFICATES.parents[2] / 'README.md'


def openssl_lines(path) -> list[str]:
  text = re.sub(r'-days (\d+|"\$DAYS")', '-days N', path.read_text())
  return re.findall(r'^ +(openssl .*)$', text, re.MULTILINE)


def test_readme_makes_certificates_as_the_tests_do():
  readme = openssl_lines(README)
  assert len(readme) == 4
  assert readme == openssl_lines(credentials.CERTIFICATES / 'make.sh')


def test_readme_names_the_flags_that_there_are():
  security = (
    README.read_text().partition('## Security')[2].partition('\n## ')[0]
  )
  named = set(re.findall(r'--([a-z_]+)\b', security))
  known = {*flags.ACCESS_FILES, *flags.ACCESS_VOUCHED}
  assert known <= named
