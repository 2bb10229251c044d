# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of code changes with what is computed, and only then."""

from diloco.sweeps import code

TEXT = '''"""A module."""

def double(x):
  """Doubles."""
  return 2 * x  # Twice.
'''


def test_words_do_not_change_it():
  asked = code.fingerprint_of({'a.py': TEXT})
  other = TEXT.replace('# Twice.', '').replace('Doubles', 'Makes two of one')
  assert code.fingerprint_of({'a.py': other}) == asked
  assert len(asked) == 8


def test_what_is_computed_does():
  asked = code.fingerprint_of({'a.py': TEXT})
  assert code.fingerprint_of({'a.py': TEXT.replace('2', '3')}) != asked
  assert code.fingerprint_of({'a.py': TEXT.replace('*', '+')}) != asked
  assert code.fingerprint_of({'b.py': TEXT}) != asked


def test_it_does_not_depend_on_the_version_of_python():
  # As 3.11 and 3.12 give it; 3.12 parses more fields.
  text = "def f(x):\n  return f'{x!r} {x:3}'\n"
  assert code.fingerprint_of({'a.py': text}) == '5d3f56cd'


def test_this_code_has_one():
  assert code.fingerprint() == code.fingerprint()
