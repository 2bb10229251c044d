# SPDX-License-Identifier: Apache-2.0
"""Checks what a configuration may be, and how it says what is wrong."""

import dataclasses
import math

import pytest

from diloco.config import run_config, sections
from diloco.config.sections import ConfigError
from diloco.data.sources import MixtureSource
from diloco.protocol.config import BLEND, OLD_BLENDS, with_current_blend
from experiments import common


def changed(**keys):
  """The defaults with keys such as outer__lr=1.0 changed."""
  config = common.base()
  for key, value in keys.items():
    section, _, name = key.rpartition('__')
    (config[section] if section else config)[name] = value
  return config


def problem_of(config):
  with pytest.raises(ConfigError) as caught:
    run_config.build(config)
  assert len(caught.value.problems) == 1, caught.value
  return caught.value.problems[0]


def test_the_defaults_are_valid_and_complete():
  config = run_config.build(common.base())
  assert config.protocol.fragments == 8
  assert config.outer == sections.OuterConfig(lr=0.6, momentum=0.7)
  assert sections.flatten(common.base()).keys() == run_config.key_types().keys()


@pytest.mark.parametrize(('old', 'now'), OLD_BLENDS.items())
def test_a_value_of_the_old_name_is_taken_and_said_once(old, now, capsys):
  sections._renamed.cache_clear()
  for _ in range(2):
    config = run_config.build(changed(protocol__blend=old))
    assert config.protocol.blend == now
  assert capsys.readouterr().err == (
    f'note: protocol.blend={old} is now {now}; the old name goes with '
    'the next release\n'
  )


@pytest.mark.parametrize(('old', 'now'), OLD_BLENDS.items())
def test_a_recorded_old_name_is_read_without_a_word(old, now, capsys):
  sections._renamed.cache_clear()
  config = run_config.build(changed(protocol__blend=now))
  recorded = dataclasses.asdict(config)
  recorded['protocol']['blend'] = old
  assert run_config.restore(recorded) == config
  assert recorded['protocol']['blend'] == old
  fingerprints = run_config.agreement(config)
  begun = {**fingerprints, 'protocol.blend': f'"{old}"'}
  assert with_current_blend(begun, BLEND) == fingerprints
  assert capsys.readouterr().err == ''


def test_an_unknown_key_names_the_nearest_one():
  config = common.base()
  config.inner.learning_rat = 1.0
  config.inner.warmup_step = 1
  with pytest.raises(ConfigError) as caught:
    run_config.build(config)
  assert caught.value.problems[1] == (
    'inner.warmup_step: unknown key, did you mean inner.warmup_steps?'
  )


def test_a_key_in_the_wrong_section_finds_its_section():
  config = common.base()
  config.block_size = 64
  assert problem_of(config) == (
    'block_size: unknown key, did you mean codec.block_size?'
  )


def test_a_missing_key_is_named_with_its_type():
  config = common.base()
  del config.codec.block_size
  assert problem_of(config) == 'codec.block_size: missing, expected int'


@pytest.mark.parametrize(
  ('key', 'value', 'expected'),
  [
    ('layers', 2.0, 'model.layers=2.0: expected int, got float'),
    ('layers', True, 'model.layers=True: expected int, got bool'),
    ('tied', 1, 'model.tied=1: expected bool, got int'),
    ('dtype', 32, 'model.dtype=32: expected str, got int'),
    ('rope_theta', 'x', "model.rope_theta='x': expected float, got str"),
  ],
)
def test_a_wrong_type_is_named(key, value, expected):
  config = common.base().to_dict()
  config['model'][key] = value
  assert problem_of(config) == expected


def test_a_quorum_of_all_follows_the_number_of_learners():
  for learners in (2, 4):
    config = changed(protocol__learners=learners, protocol__quorum=0)
    assert run_config.build(config).protocol.quorum == learners


def test_an_int_is_a_float():
  config = common.base().to_dict()
  config['outer']['lr'] = 1
  assert run_config.build(config).outer.lr == 1.0
  assert type(run_config.build(config).outer.lr) is float


@pytest.mark.parametrize(
  ('changes', 'rule'),
  [
    ({'protocol__fragments': 5}, 'P must divide H'),
    ({'codec__block_size': 0}, 'positive multiple of 8'),
    ({'codec__block_size': 12}, 'positive multiple of 8'),
    (
      {'outer__optimizer': 'adam'},
      "outer.anneal_fraction=0.1: must be 0, optimizer='adam' has no",
    ),
    (
      {'outer__eps': 1e-46},
      'outer.eps=1e-46: must be finite and above 0 as f32',
    ),
    (
      {'inner__eps': 1e-46},
      'inner.eps=1e-46: must be finite and above 0 as f32',
    ),
    ({'model__kv_heads': 3}, 'must divide model.heads=4'),
    ({'model__head_dim': 31}, 'must be even'),
    (
      {'model__kind': 'bowl', 'model__tied': True},
      "model.tied=True: kind='bowl' knows only False",
    ),
    ({'model__vocab': 100}, "data.source='stdlib' needs 256"),
    ({'inner__warmup_steps': 500}, 'less than protocol.total_steps=500'),
    ({'inner__warmup_steps': 450, 'inner__schedule': 'wsd'}, 'end before'),
    ({'data__shards': 1}, 'at least protocol.learners=2'),
    ({'data__source': 'text'}, 'needs the path'),
    ({'data__path': 'x.txt'}, "read only with data.source='text'"),
    ({'data__source': 'parquet'}, "data.source='parquet' needs the path"),
    (
      {'data__source': 'parquet', 'data__path': 'x', 'data__text_key': ''},
      "text_key='': format 'parquet' needs the name",
    ),
    (
      {
        'data__source': 'array_record',
        'data__path': 'x',
        'data__text_key': 'chat:messages',
      },
      "format 'array_record' has texts only, dialogues are in parquet, jsonl",
    ),
    (
      {'data__source': 'jsonl', 'data__path': 'x', 'data__text_key': 'a+'},
      "text_key='a+': must be a name, 'chat:NAME' or 'PROMPT+COMPLETION'",
    ),
    ({'data__source': 'mix'}, "mix=(): data.source='mix' needs 'WEIGHT"),
    ({'data__mix': ('1 parquet x',)}, "read only with data.source='mix'"),
    (
      {'data__source': 'mix', 'data__mix': ('1 parquet',)},
      "data.mix: '1 parquet' is not 'WEIGHT FORMAT PATH'",
    ),
    (
      {'data__source': 'mix', 'data__mix': ('x parquet y',)},
      "weight 'x' must be a number above 0",
    ),
    (
      {'data__source': 'mix', 'data__mix': ('0 parquet y',)},
      "weight '0' must be a number above 0",
    ),
    (
      {'data__source': 'mix', 'data__mix': ('1 csv y',)},
      "format 'csv' must be one of array_record, parquet",
    ),
    (
      {'data__source': 'mix', 'data__mix': ('1 parquet: y',)},
      "text_key='': format 'parquet' needs the name",
    ),
    ({'data__heldout_path': 'x'}, "data.source='stdlib' holds out some of"),
    ({'data__heldout_percent': 0.0}, 'above 0, at most 50'),
    ({'data__heldout_percent': 51.0}, 'above 0, at most 50'),
    ({'data__tokenizer': 'sentencepiece'}, "must be 'bytes' or 'KIND:PATH'"),
    ({'data__tokenizer': 'gpt2:x'}, "must be 'bytes' or 'KIND:PATH'"),
    ({'data__tokenizer': 'tokenizers:x'}, "source='stdlib' is of bytes"),
    ({'data__end_token': 'x'}, "the end of 'bytes' is byte 0"),
    ({'data__source': 'grammar', 'data__grammar_bytes': 99}, 'takes 16385'),
    ({'mesh__fsdp': 16}, 'must be a multiple of mesh.fsdp=16'),
    (
      {'mesh__fsdp': 4, 'inner__accumulate': 4},
      'data.batch=8: must be a multiple of mesh.fsdp=4 * mesh.expert=1 * '
      'inner.accumulate=4 =',
    ),
    (
      {'mesh__slices': 3, 'mesh__fsdp': 2},
      'data.batch=8: must be a multiple of mesh.slices=3 * mesh.fsdp=2 * '
      'mesh.expert=1 * inner.accumulate=1 = 6',
    ),
    ({'mesh__slices': 0}, 'mesh.slices=0: must be at least 1'),
    ({'mesh__tensor': 4}, 'must be a multiple of mesh.tensor=4'),
    ({'mesh__expert': 2}, "must be 1, model.kind='decoder' has no experts"),
    (
      {'mesh__expert': 3, 'model__kind': 'moe', 'data__batch': 9},
      'model.experts=8: must be a multiple of mesh.expert=3',
    ),
    (
      {'model__kind': 'moe', 'model__top_k': 9},
      'model.top_k=9: must be at most model.experts=8',
    ),
    ({'transport__port': 70000}, '0 … 65535'),
    (
      {'protocol__blend': 'interpolate', 'protocol__blend_alpha': 2.0},
      'in [0, 1]',
    ),
    ({'name': 'a/b'}, 'letters, digits'),
    ({'seed': -1}, 'must be in 0'),
  ],
)
def test_an_impossible_value_names_its_rule(changes, rule):
  assert rule in problem_of(changed(**changes))


@pytest.mark.parametrize(
  ('key', 'rule'),
  [
    pytest.param(f'{section}.{name}', rule, id=f'{section}.{name}')
    for section, cls in run_config.SECTIONS.items()
    for name, rule in sections.rules(cls).items()
    if section != 'protocol'  # It has rules of its own.
  ],
)
def test_a_value_that_breaks_the_rule_of_its_key_is_named(key, rule):
  """Just outside of the bounds, where these are not infinite."""
  section, _, name = key.partition('.')
  config = common.base().to_dict()
  kind = type(config[section][name])
  odd = {str: ['nope'], int: [0, -1, 1], float: [math.inf, 1.0, 1.5, -0.1]}
  broken = [value for value in odd[kind] if not rule.holds(value)]
  assert broken
  if kind is float:
    broken.append(math.nan)
  for value in broken:
    config[section][name] = value
    with pytest.raises(ConfigError) as caught:
      run_config.build(config)
    assert f'{key}={value!r}: {rule.text}' in caught.value.problems


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_number_of_the_protocol_is_named_by_its_key(value):
  """Its rules are its own; the key stands before each."""
  for name in ('grace_safety', 'grace_cap_steps', 'patience', 'blend_alpha'):
    with pytest.raises(ConfigError) as caught:
      run_config.build(changed(**{f'protocol__{name}': value}))
    for problem in caught.value.problems:
      assert problem.startswith(f'protocol.{name}={value}, must be ')


def test_all_problems_stand_in_one_message():
  config = changed(model__head_dim=3, codec__block_size=0, data__shards=1)
  config.oter = 3
  del config.merge.rule
  with pytest.raises(ConfigError) as caught:
    run_config.build(config)
  keys = [problem.partition('=')[0] for problem in caught.value.problems]
  assert keys == [
    'oter: unknown key, did you mean outer.lr?',
    'merge.rule: missing, expected str',
    'model.head_dim',
    'codec.block_size',
    'data.shards',
  ]


def test_a_mix_is_what_its_items_say():
  mix = ('0.7 parquet /data/a b/*', '3 array_record: gs://bucket/x')
  data = run_config.build(changed(data__source='mix', data__mix=mix)).data
  assert data.items == (
    MixtureSource('parquet', '/data/a b/*', 'text', 0.7),
    MixtureSource('array_record', 'gs://bucket/x', '', 3.0),
  )
  assert data.heldout is None
  config = changed(data__source='parquet', data__path='c4', data__text_key='t')
  config.data.heldout_path = 'c4-held'
  data = run_config.build(config).data
  assert data.items == (MixtureSource('parquet', 'c4', 't', 1.0),)
  assert data.heldout == MixtureSource('parquet', 'c4-held', 't', 1.0)


def test_what_no_syncer_serves_is_refused():
  config = changed(protocol__learners=1008, data__shards=2000)
  run_config.build(config)
  config.protocol.learners = 1009
  problem = problem_of(config)
  assert 'protocol.learners=1009' in problem
  assert 'serves at most 1008' in problem
  config = changed(
    protocol__fragments=10_000, protocol__sync_every_steps=10_000
  )
  assert 'protocol.fragments=10000: at most' in problem_of(config)


def test_rda_is_of_whole_tables():
  config = changed(merge__embedding='rda')
  problem = problem_of(config)
  assert "merge.embedding='rda': fragments.embedding='split' cuts" in problem
  assert "give fragments.embedding='own'" in problem
  config.fragments.embedding = 'own'
  run_config.build(config)
  config.fragments.embedding = 'split'
  config.protocol.fragments = 1  # Nothing is cut.
  run_config.build(config)


def test_bytes_need_their_vocabulary():
  config = changed(data__source='parquet', data__path='x', model__vocab=200)
  assert "data.source='parquet' needs 256" in problem_of(config)
  config.data.tokenizer = 'tokenizers:x'  # Its file says how many it needs.
  run_config.build(config)


@pytest.mark.parametrize('devices', [1, 2, 8])
def test_a_mesh_must_use_exactly_the_devices(devices):
  config = run_config.build(changed(mesh__fsdp=2, mesh__tensor=2))
  run_config.check_devices(config, 4)
  with pytest.raises(ConfigError, match=f'= 4 devices: .* has {devices}$'):
    run_config.check_devices(config, devices)


def test_the_agreement_leaves_out_what_may_differ():
  one = run_config.build(common.base())
  other = run_config.build(
    changed(
      transport__port=1,
      transport__host='localhost',
      checkpoint__learner_every_steps=50,
      run__cpu_threads=3,
      run__log_every_steps=7,
      mesh__fsdp=2,
      model__remat='full',
      faults=('kill learner 1 at 0.5',),
    )
  )
  assert run_config.agreement(one) == run_config.agreement(other)


@pytest.mark.parametrize(
  'change',
  [
    {'seed': 1},
    {'outer__lr': 0.5},
    {'protocol__total_steps': 501},
    {'protocol__blend': 'interpolate', 'protocol__blend_alpha': 0.5},
    {'codec__error_feedback': False},
    {'transport__data_plane': 'grpc'},
  ],
)
def test_the_agreement_sees_what_must_agree(change):
  one = run_config.build(common.base())
  other = run_config.build(changed(**change))
  assert run_config.agreement(one) != run_config.agreement(other)


def test_differences_name_the_key_and_both_values():
  mine = run_config.agreement(run_config.build(common.base()))
  theirs = run_config.agreement(run_config.build(changed(outer__lr=0.7)))
  assert run_config.differences(mine, theirs) == 'outer.lr: 0.6 here, 0.7 there'
  assert run_config.differences(mine, mine) == ''
  del theirs['protocol.quorum_rule']  # Newer than that run.
  assert run_config.differences(mine, theirs) == 'outer.lr: 0.6 here, 0.7 there'
  del theirs['seed']
  assert 'seed: 0 here, absent there' in run_config.differences(mine, theirs)


@pytest.mark.parametrize('section', ['run', 'protocol', 'outer', 'lab'])
def test_a_recorded_run_outlives_new_keys(section):
  base = run_config.build(common.base())
  for key in dataclasses.asdict(base)[section]:
    fields = dataclasses.asdict(base)
    del fields[section][key]
    assert run_config.restore(fields) == base, key


def test_a_section_is_never_made_up():
  fields = dataclasses.asdict(run_config.build(common.base()))
  del fields['outer']
  with pytest.raises(ConfigError, match=r'outer\.lr: missing'):
    run_config.restore(fields)


def test_alpha_is_read_where_runs_once_had_it():
  config = run_config.build(
    changed(protocol__blend='interpolate', protocol__blend_alpha=0.5)
  )
  fields = dataclasses.asdict(config)
  fields['blend_alpha'] = fields['protocol'].pop('blend_alpha')
  assert run_config.restore(fields) == config


def test_a_recorded_section_that_is_none_is_refused():
  fields = dataclasses.asdict(run_config.build(common.base()))
  with pytest.raises(ConfigError, match=r'run: '):
    run_config.restore({**fields, 'run': 3})
