# SPDX-License-Identifier: Apache-2.0
"""Dialogues: what counts of them, in files of any format, and in the loss."""

import gzip
import json

import jax
import numpy as np
import pytest

from diloco.data import chat_templates, sources, text_windows
from diloco.data.corpus import file_corpus, text_key_of
from diloco.data.dialogues import Dialogue, document_of, split_signed
from diloco.data.sources import FORMATS, MixtureSource
from diloco.data.tokenizers import BYTES, make_tokenizer, train_bpe
from diloco.models import api
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig
from tests.data import made_files

TURNS = [
  {'role': 'user', 'content': 'größer 3 4'},
  {'role': 'assistant', 'content': '4'},
  {'role': 'user', 'content': 'less'},
  {'role': 'assistant', 'content': '3!'},
]
PAIRS = [{'prompt': f'{i}+1=', 'completion': f'{i + 1}'} for i in range(300)]
CHATML = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
  "{% if m['role'] == 'assistant' %}{% generation %}"
  "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
  "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
  "{{ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def split(signed):
  """Returns the text of all tokens, and that of those that count."""
  tokens, counted = split_signed(signed)
  return text_of(tokens), text_of(tokens[counted > 0])


def text_of(tokens):
  return bytes(tokens.tolist()).decode()


def test_what_is_said_counts():
  chat = document_of({'messages': TURNS}, 'chat:messages')
  assert split(BYTES.encode_dialogue(chat)) == (
    'user: größer 3 4\nassistant: 4\nuser: less\nassistant: 3!\n\0',
    '4\n3!\n\0',
  )
  pair = document_of(PAIRS[8], 'prompt+completion')
  assert split(BYTES.encode_dialogue(pair)) == ('8+1=9\0', '9\0')
  asked = document_of({'messages': TURNS[:3]}, 'chat:messages')
  assert split(BYTES.encode_dialogue(asked))[1] == '4\n'
  assert not len(BYTES.encode_dialogue(Dialogue(parts=(('', True),))))


@pytest.fixture
def folder(tmp_path):
  """A tokenizer as of a model of Hugging Face, with ChatML."""
  pytest.importorskip('jinja2')
  content = json.loads(train_bpe(made_files.texts(), 300))
  for i, name in enumerate(('<|im_start|>', '<|im_end|>'), 300):
    content['added_tokens'].append(
      content['added_tokens'][0] | {'id': i, 'content': name}
    )
  (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
  config = {'eos_token': {'content': '<|im_end|>'}, 'chat_template': CHATML}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
  return tmp_path


def test_a_chat_template_marks_what_is_said(folder):
  whole = (
    '<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\nthat<|im_end|>\n'
  )
  messages = ({'role': 'user', 'content': 'what'},
              {'role': 'assistant', 'content': 'that'})  # fmt: skip
  marking = make_tokenizer(f'hf:{folder}')
  bare = CHATML.replace('{% generation %}', '').replace(
    '{% endgeneration %}', ''
  )
  (folder / 'chat_template.jinja').write_text(bare)
  other = make_tokenizer(f'hf:{folder}')
  assert marking.fingerprint != other.fingerprint
  for tokenizer, said in ((marking, b'that'), (other, b'that\n')):
    assert tokenizer.vocab == 302
    signed = tokenizer.encode_dialogue(Dialogue(messages))
    tokens, counted = split_signed(signed)
    assert (tokens == 300).sum() == (tokens == 301).sum() == 2, 'special ones'
    assert tokenizer.raw_decode(tokens) == whole.encode()
    assert tokenizer.decode(tokens[counted > 0]) == said
    assert tokenizer.end == 301 in tokens[counted > 0]
  # A user's text has no special tokens by itself.
  assert 301 not in marking.encode([b'<|im_end|>'])[0][:-1]


def test_a_template_that_changes_what_came_before_is_refused():
  pytest.importorskip('jinja2')
  last = chat_templates.compiled(
    '{{ messages | length }}{{ messages[-1].content }}', 'it', {}
  )
  with pytest.raises(ValueError, match='mark that by'):
    last(tuple(TURNS))
  refuses = chat_templates.compiled(
    "{{ raise_exception('no system') }}", 'it', {}
  )
  with pytest.raises(ValueError, match='it: no system'):
    refuses(tuple(TURNS))
  with pytest.raises(ValueError, match='it: is no template'):
    chat_templates.compiled('{% for %}', 'it', {})
  with pytest.raises(ValueError, match='unsafe'):
    chat_templates.compiled("{{ ''.__class__.__mro__ }}", 'it', {})(
      tuple(TURNS)
    )


@pytest.mark.parametrize('name', ['jsonl', 'arrow', 'parquet'])
def test_rows_say_what_counts(name, tmp_path):
  folder = _written(name, tmp_path / 'rows', PAIRS)
  source = MixtureSource(name, str(folder), 'prompt+completion')
  assert text_key_of(name, str(folder), str(tmp_path)) == source.text_key
  corpus = file_corpus([source], None, 8.0, BYTES, str(tmp_path), print)
  windows = text_windows.Windows(corpus.train, 64)
  batch = text_windows.stack([windows[i] for i in range(3)])
  assert list(batch) == list(text_windows.KEYS)
  for tokens, segments, counted in zip(*batch.values()):
    for segment in range(1, segments[-1]):  # The whole ones.
      text = text_of(tokens[segments == segment])
      said = text_of(tokens[(segments == segment) & (counted > 0)])
      prompt = text.partition('=')[0] + '='
      assert said == text.removeprefix(prompt) == f'{int(prompt[:-3]) + 1}\0'
  plain = MixtureSource(name, str(folder), 'completion')
  mixed = file_corpus([source, plain], None, 8.0, BYTES, str(tmp_path), print)
  *_, all_count = text_windows.Windows(mixed.train.streams[1], 64)[0]
  assert all_count.all()
  loose = file_corpus(
    [source], None, 8.0, BYTES, str(tmp_path), print, apart=False
  )
  _, whole, counted = text_windows.Windows(loose.train, 64)[0]
  assert not whole.any() and 0 < counted.mean() < 1


def _written(name, folder, records):
  if name == 'jsonl':
    return made_files.json_lines(folder, records)
  if name == 'arrow':
    return made_files.arrow(folder, records)
  import pyarrow as pa
  import pyarrow.parquet as pq

  folder.mkdir()
  table = pa.Table.from_pylist(records)
  pq.write_table(table, folder / 'a.parquet', row_group_size=23)
  return folder


@pytest.mark.parametrize('suffix', ['.gz', '.zst'])
def test_compressed_lines_are_those_of_the_file(suffix, tmp_path):
  plain = tmp_path / 'a.jsonl'
  plain.write_text(''.join(json.dumps(each) + '\n' for each in PAIRS))
  if suffix == '.gz':
    pack = gzip.compress
  else:
    pack = pytest.importorskip('zstandard').ZstdCompressor().compress
  packed = tmp_path / f'a.jsonl{suffix}'
  data = plain.read_bytes()
  packed.write_bytes(pack(data[:999]) + pack(data[999:]))
  index = str(tmp_path / 'index')
  ours, theirs = (
    FORMATS['jsonl'].open_files(str(path), 'completion', index)[0]
    for path in (plain, packed)
  )
  assert ours.read(7, 280) == theirs.read(7, 280)
  packed.write_bytes(packed.read_bytes()[:-30])
  if suffix == '.gz':
    with pytest.raises(ValueError, match='can not be decompressed'):
      FORMATS['jsonl'].open_files(str(packed), 'completion', index)


@pytest.mark.parametrize(
  ('line', 'key', 'said'),
  [
    ('{"a": 1', 'text', 'is no JSON .*column 8'),
    ('[1]', 'text', r'is a list, must be an object such as {.text.: .….}'),
    ('{"a": 1, "b": 2}', 'text', "has no 'text', .*those there are: a, b"),
    ('{"text": 3}', 'text', "'text' is a number, must be a string"),
    ('{"m": "x"}', 'chat:m', "'m' is a string, must be a list of"),
    ('{"m": []}', 'chat:m', "'m' is empty, must be a list of"),
    ('{"m": [{"role": "user"}]}', 'chat:m', r'm\[0\] has role, must be {'),
    (
      '{"m": [{"role": "gpt", "content": "x"}]}',
      'chat:m',
      'has messages of gpt, none of assistant',
    ),
    ('{"a": "x", "b": null}', 'a+b', "'b' is a null, must be a string"),
  ],
)
def test_a_broken_line_is_named(line, key, said, tmp_path):
  right = {'text': '', 'm': TURNS, 'a': '', 'b': ''}
  path = tmp_path / 'a.jsonl'
  path.write_text(f'\n{json.dumps(right)}\n\n{line}\n')
  [file] = FORMATS['jsonl'].open_files(str(path), key, str(tmp_path))
  assert (file.count, len(file.read(0, 1))) == (2, 1)
  with pytest.raises(ValueError, match=f'a.jsonl, line 4: .*{said}') as error:
    file.read(0, 2)
  assert '\n' not in str(error.value)


def test_files_are_known_by_their_names(tmp_path):
  for name, source in (
    ('a.jsonl', 'jsonl'), ('a.jsonl.zst', 'jsonl'), ('a.json', 'jsonl'),
    ('a.parquet', 'parquet'), ('a.array_record-00000-of-00001', 'array_record'),
    ('a.txt', 'text'), ('README', 'text'), ('/no/*.parquet', 'parquet'),
  ):  # fmt: skip
    assert sources.recognised(str(tmp_path / name)) == source, name
  folder = made_files.arrow(tmp_path / 'saved', PAIRS)
  assert sources.recognised(str(folder)) == 'arrow'
  (folder / 'a.jsonl').touch()
  with pytest.raises(ValueError, match=r'a.jsonl and data-00000.*/\*.arrow'):
    sources.recognised(str(folder))
  (tmp_path / 'dataset_dict.json').write_text('{"splits": ["train", "test"]}')
  with pytest.raises(ValueError, match='has the splits train, test; name one'):
    FORMATS['arrow'].open_files(str(tmp_path), 'text')


def test_the_loss_is_of_what_counts():
  config = DecoderConfig(
    vocab=64, layers=1, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=32
  )
  model = make_decoder(config)
  rng = np.random.default_rng(0)
  params = api.unflatten(
    {
      path: rng.standard_normal(leaf.shape, np.float32)
      for path, leaf in api.check_model(model).items()
    }
  )
  tokens = rng.integers(0, 64, (3, 9), np.int32)
  segments = np.repeat([[0, 0, 0, 0, 1, 1, 1, 1, 1]], 3, 0).astype(np.int32)
  counted = rng.integers(0, 2, (3, 9), np.int32)
  counted[1] = 0
  batch = {'tokens': tokens, 'segments': segments, 'counted': counted}

  compiled = jax.jit(model.loss)

  def loss(batch):
    return compiled(params, batch, jax.random.key(1))

  both = segments[:, 1:] == segments[:, :-1]
  total, metrics = loss(batch)
  assert metrics['counted'] == (both & (counted[:, 1:] > 0)).sum()
  # It is the mean of each prediction's own.
  alone = 0.0
  for row, place in zip(*np.nonzero(both & (counted[:, 1:] > 0))):
    one = np.zeros_like(counted)
    one[row, place + 1] = 1
    alone += loss(batch | {'counted': one})[0]
  assert total == pytest.approx(float(alone / metrics['counted']), rel=1e-5)
  assert loss(batch | {'counted': np.zeros_like(counted)})[0] == 0


def test_a_trained_tokenizer_is_the_same_again_and_knows_any_text(tmp_path):
  made = train_bpe(made_files.texts(), 320)
  assert made == train_bpe(made_files.texts(), 320)
  path = tmp_path / 'bpe.json'
  path.write_bytes(made)
  tokenizer = make_tokenizer(f'tokenizers:{path}')
  assert (tokenizer.vocab, tokenizer.end_text) == (320, '<|endoftext|>')
  odd = 'never seen: Ωß\x00\n'.encode()
  assert tokenizer.decode(tokenizer.encode([odd])[0]) == odd
