# SPDX-License-Identifier: Apache-2.0
"""Stands for gcloud: keeps machines and slices in a folder, as JSON.

`state.json` there: 'instances' and 'slices' by name; 'refusals', what the next
creations of slices fail with; 'outages', the same of any call. Every call is a
line of `calls.jsonl`.
"""

import json
import os
import pathlib
import sys

FOLDER = pathlib.Path(os.environ['FAKES'])
STATE = FOLDER / 'state.json'


def main(argv):
  with (FOLDER / 'calls.jsonl').open('a') as file:
    file.write(json.dumps(argv) + '\n')
  state = json.loads(STATE.read_text())
  words = [word for word in argv if not word.startswith('--')]
  flags = dict(
    word[2:].partition('=')[::2] for word in argv if word.startswith('--')
  )
  if words[0] == 'alpha':
    words = words[1:]
  if state['outages']:
    refuse(state, 'outages')
  if words[:2] == ['compute', 'instances']:
    instance(state['instances'], *words[2:4], flags)
  else:
    assert words[:3] == ['compute', 'tpus', 'queued-resources'], words
    slices(state, *words[3:5], flags=flags)
  STATE.write_text(json.dumps(state))


def fail(text):
  sys.exit(f'ERROR: (gcloud) {text}')


def refuse(state, why):
  reason = state[why].pop(0)
  STATE.write_text(json.dumps(state))
  fail(reason)


def instance(instances, verb, name, flags):
  if verb == 'create':
    script = pathlib.Path(startup(flags)).read_text()
    instances[name] = {'ip': '10.0.0.1', 'script': script, 'exit': None}
  elif name not in instances:
    fail(f"The resource '{name}' was not found")
  elif verb == 'delete':
    del instances[name]
  elif verb == 'describe':
    print(instances[name]['ip'])
  elif instances[name]['exit'] is None:
    fail("The resource 'diloco/exit' of type 'Guest Attribute' was not found.")
  else:
    print(instances[name]['exit'])


def slices(state, verb, name=None, flags=None):
  held = state['slices']
  if verb == 'list':
    print(json.dumps([described(name, held[name]) for name in held]))
  elif verb == 'create':
    if state['refusals']:
      refuse(state, 'refusals')
    if name in held:
      fail(f'ALREADY_EXISTS: {name}')
    held[name] = {
      'state': 'WAITING_FOR_RESOURCES',
      'labels': dict(pair.split('=') for pair in flags['labels'].split(',')),
      'script': pathlib.Path(startup(flags)).read_text(),
    }
  elif name not in held:
    fail(f'NOT_FOUND: {name}')
  else:
    assert verb == 'delete', verb
    held[name]['state'] = 'DELETING'


def described(name, held):
  return {
    'name': f'projects/p/locations/z/queuedResources/{name}',
    'state': {'state': held['state']},
    'tpu': {'nodeSpec': [{'nodeId': name, 'node': {'labels': held['labels']}}]},
  }


def startup(flags):
  return flags['metadata-from-file'].removeprefix('startup-script=')


if __name__ == '__main__':
  main(sys.argv[1:])
