# SPDX-License-Identifier: Apache-2.0
"""Chat templates of Hugging Face's tokenizers, in Jinja.

What an assistant is to say is what a template marks by {% generation %}; or,
where it marks nothing, what it adds for an assistant's message to the
conversation before, with the beginning of an answer.
"""

import json
from collections.abc import Callable, Mapping

from diloco.data.dialogues import ASSISTANT, Messages, Parts
from diloco.data.tokenizers import needed

# Around what is marked; no text has these: Unicode says they are no characters.
_OPEN, _CLOSE = '\ufdd0', '\ufdd1'


def compiled(
  source: str, where: str, special: Mapping[str, str]
) -> Callable[[Messages], Parts]:
  """Compiles a template; it runs in a sandbox, and does not know the time.

  Args:
    where: what to call it in messages.
    special: names of special tokens, such as bos_token, and their texts.

  Raises:
    ValueError: Jinja is not installed, or it is no template.
  """
  with needed(where):
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """The block {% generation %} … {% endgeneration %}."""

    tags = frozenset({'generation'})

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      call = self.call_method('_mark')
      return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller):
      return f'{_OPEN}{caller()}{_CLOSE}'

  def refuse(message):
    raise jinja2.TemplateError(message)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, 'jinja2.ext.loopcontrols'],
  )
  environment.filters['tojson'] = lambda value, indent=None: json.dumps(
    value, ensure_ascii=False, indent=indent
  )
  environment.globals['raise_exception'] = refuse
  try:
    template = environment.from_string(source)
  except jinja2.TemplateError as error:
    raise ValueError(f'{where}: is no template ({error})') from None

  def render(messages: Messages, begins_answer: bool = False) -> str:
    try:
      return template.render(
        messages=[*messages], add_generation_prompt=begins_answer, **special
      )
    except jinja2.TemplateError as error:
      raise ValueError(f'{where}: {error}') from None

  def parts(messages: Messages) -> Parts:
    whole = render(messages)
    if _OPEN in whole:
      return _marked(whole)
    found, at = [], 0
    for i, message in enumerate(messages):
      if message['role'] != ASSISTANT:
        continue
      before = render(messages[:i], True)
      after = render(messages[: i + 1])
      if not (whole.startswith(after) and after.startswith(before)):
        raise ValueError(
          f'{where}: what it makes of a conversation does not begin with what '
          f'it makes of its first {i + 1} messages, so that it is not known '
          'what the assistant says; mark that by {% generation %}'
        )
      found += [(whole[at : len(before)], False)]
      found += [(whole[len(before) : len(after)], True)]
      at = len(after)
    return [*found, (whole[at:], False)]

  return parts


def _marked(whole: str) -> Parts:
  first, *others = whole.split(_OPEN)
  parts = [(first, False)]
  for each in others:
    said, _, more = each.partition(_CLOSE)
    parts += [(said, True), (more, False)]
  return parts
