# SPDX-License-Identifier: Apache-2.0
"""Citations can be looked up: the paper's own parts, and pages that exist.

A section sign points at a page that is not in the repository. The paper is
cited by algorithm, equation, table, figure or appendix.
"""

import pathlib
import re

import pytest

from tests.repository import tree

ITSELF = pathlib.Path(__file__).relative_to(tree.ROOT).as_posix()
SECTION = re.compile(r'§|\((?:paper|design): *[A-Z`]', re.IGNORECASE)
PATTERNS = ('*.py', '*.md', '*.txt', '*.sh', '*.ipynb', '*.toml', '*.yml')


def _wrong(text: str) -> list[str]:
  return [line.strip() for line in text.splitlines() if SECTION.search(line)]


@pytest.mark.parametrize(
  'name', [name for name in tree.tracked(*PATTERNS) if name != ITSELF]
)
def test_no_section_of_an_absent_page_is_cited(name):
  assert not _wrong((tree.ROOT / name).read_text())


@pytest.mark.parametrize(
  'text', ['(paper §5.3)', 'Design: §3', '`design` §3', '(paper: Alg. 2)']
)
def test_such_a_citation_would_be_found(text):
  assert _wrong(text)


def test_the_package_names_the_paper():
  text = (tree.ROOT / 'diloco' / '__init__.py').read_text()
  assert 'Decoupled DiLoCo for Resilient Distributed Pre-training' in text
  assert 'arXiv 2604.21428' in text
