# SPDX-License-Identifier: Apache-2.0
"""The script that a virtual machine runs at each of its starts: one role.

It reads secrets, starts the role's container, and starts it again unless it
ended with success or a fatal exit code. That code it leaves as a guest
attribute, and in a file: a machine that starts again then does nothing.

The hosts of a slice run this side by side and don't speak with each other. When
a learner dies on one, JAX ends it on all others within `DEAD_WITHIN_S`, and
each waits for longer than that before it starts again. So none meets a process
of the last attempt, all start within `DEAD_WITHIN_S` of each other, and the
first to start wait for the last at the coordinator. Should one start earlier
all the same, after a reboot, then that attempt dies too, everywhere, and the
next begins as told.
"""

import re
import shlex
from collections.abc import Sequence

from launch.backends.base import (
  COPIED_EVERY_S,
  KEPT_BEHIND,
  Addresses,
  copies_results,
  shell_command,
)
from launch.exit_policy import EXITS_FATAL
from launch.job import (
  CONFIG_FOLDER,
  COORDINATOR_PORT,
  SECRET_FOLDER,
  JobSpec,
)
from launch.program import LEARNER, SYNCER, Task

METADATA = 'http://metadata.google.internal/computeMetadata/v1/instance'
SECRETS = 'https://secretmanager.googleapis.com/v1/projects'
EXIT_ATTRIBUTE = 'diloco/exit'
OBJECTS = 'https://storage.googleapis.com/storage/v1/b'
UPLOADS = 'https://storage.googleapis.com/upload/storage/v1/b'
REGISTRIES = ('docker.pkg.dev', 'gcr.io')  # They require authentication.
AGAIN_S = 10
DEAD_WITHIN_S = 20  # The learner's own bound, by heartbeats.
TOGETHER_AGAIN_S = DEAD_WITHIN_S + 10  # With what docker needs to end.


def startup_script(
  whole: JobSpec, role: Task, project: str, syncer: str, attempt: int
) -> str:
  """Returns the script of one machine; all hosts of a slice run the same.

  Args:
    syncer: 'host:port' of the syncer.
    attempt: from 1; how often this slice was requested.
  """
  name = whole.role_name(role)
  fatal = '|'.join(map(str, EXITS_FATAL))
  is_one_of_many = role.resources.accelerator.hosts > 1
  again_s = TOGETHER_AGAIN_S if is_one_of_many else AGAIN_S
  last_copy = '  copy\n' if copies_results(whole, role) else ''
  return f"""\
#!/bin/bash
# {name}, attempt {attempt}: written by launch.main.
{_functions(name, project)}
printf %s {shlex.quote(whole.config_text)} \\
  >"$folder"/config/{shlex.quote(whole.config_name)}
{_secrets(whole, role)}{_login(whole.image)}\
host=$(metadata {METADATA}/network-interfaces/0/ip)
{_meeting(role)}{_doors(role)}{_evaluator(whole, role)}\
{_copying(whole, role)}\
for ((restarts = 0; ; restarts++)); do
  docker rm --force diloco >/dev/null 2>&1
  {_container(whole, role, syncer)}
  code=$?
{last_copy}\
  case $code in
    0|{fatal}) over "$code" ;;
  esac
  if (( restarts >= {whole.restarts_max} )); then
    over "$code"
  fi
  echo "{name}: exit code $code, again in {again_s} s"
  sleep {again_s}
done
"""


def _functions(name: str, project: str) -> str:
  """Returns the folders and the shell functions of the script."""
  return f"""\
folder=${{DILOCO_FOLDER:-/var/lib/diloco}}
mkdir -p "$folder"/config "$folder"/secret "$folder"/workdir
chmod 700 "$folder"/secret
export DOCKER_CONFIG=$folder/docker  # A home folder may be read-only.
if [[ -e $folder/over ]]; then
  echo '{name}: is over'
  exit 0
fi

metadata() {{
  curl --silent --show-error --fail --retry 5 -H 'Metadata-Flavor: Google' \\
    "$@"
}}
access_token() {{
  metadata {METADATA}/service-accounts/default/token |
    sed 's/.*"access_token":"\\([^"]*\\)".*/\\1/'
}}
secret() {{ # $1: its name; $2: the file.
  until curl --silent --show-error --fail \\
    -H "Authorization: Bearer $(access_token)" \\
    "{SECRETS}/{project}/secrets/$1/versions/latest:access" |
    sed -n 's/.*"data": *"\\([^"]*\\)".*/\\1/p' | base64 -d >"$2" &&
    [[ -s $2 ]]; do
    echo "{name}: secret $1 can not be read, again in {AGAIN_S} s"
    sleep {AGAIN_S}
  done
  chmod 600 "$2"
}}
# $1: why. Nothing is started again after it.
over() {{
  metadata -X PUT --data "$1" \\
    {METADATA}/guest-attributes/{EXIT_ATTRIBUTE}
  echo "$1" >"$folder"/over
  echo "{name}: over, exit code $1"
  exit 0
}}
"""


def secret_name(prefix: str, file_name: str) -> str:
  """Returns a file's name in the Secret Manager, where names have no dots."""
  return f'{prefix}-{re.sub("[^-_A-Za-z0-9]", "-", file_name)}'


def _secrets(whole: JobSpec, role: Task) -> str:
  if not whole.secret:
    return ''
  lines = [
    f'secret {secret_name(whole.secret_of(role), each)} '
    f'"$folder"/secret/{shlex.quote(each)}\n'
    for each in whole.secret_files
  ]
  return ''.join(lines)


def _login(image: str) -> str:
  registry = image.partition('/')[0]
  if not registry.endswith(REGISTRIES):
    return ''
  return (
    f'access_token | docker login --username oauth2accesstoken '
    f'--password-stdin https://{registry}\n'
  )


def _meeting(role: Task) -> str:
  """Returns shell code that finds this machine's number and the first host."""
  if role.resources.accelerator.hosts == 1:
    return ''
  return f"""\
attribute() {{ # $1: its name. One that is empty is not there yet.
  local value
  until value=$(metadata {METADATA}/attributes/$1) && [[ -n $value ]]; do
    sleep {AGAIN_S}
  done
  echo "$value"
}}
index=$(attribute agent-worker-number)
# 'ID:PORT:ADDRESS' of each host, by their numbers.
first=$(attribute worker-network-endpoints | cut -d, -f1 | cut -d: -f3)
coordinator=$first:{COORDINATOR_PORT}
"""


def _doors(role: Task) -> str:
  """The syncer's system lets only ssh in, whatever the network allows."""
  if role.kind == LEARNER:
    return ''
  return 'iptables --wait --insert INPUT --protocol tcp --jump ACCEPT\n'


def _copying(whole: JobSpec, role: Task) -> str:
  """Returns shell code that copies files to the bucket as they grow.

  A learner's new slice has an empty disk: its files come from the bucket first,
  which would keep those of its last life alone.
  """
  if not copies_results(whole, role):
    return ''
  left_out = ' '.join(f"! -path './{each}*'" for each in sorted(KEPT_BEHIND))
  restored = 'until restore; do sleep 10; done\n'
  return f"""\
uploads={UPLOADS}/{whole.results_bucket}/o
objects={OBJECTS}/{whole.results_bucket}/o
storage() {{ # A request to Cloud Storage.
  curl --silent --show-error --fail \\
    -H "Authorization: Bearer $(access_token)" "$@"
}}
# Whole files that have changed since the last time.
copy() {{
  (
    flock 9
    # A clock's tick may hold two changes: the last ones are copied twice.
    touch --date='2 seconds ago' "$folder"/copying
    [[ -e $folder/copied ]] || touch --date=@0 "$folder"/copied
    cd "$folder"/workdir || exit
    find . -type f -newer "$folder"/copied {left_out} |
      while read -r file; do
        name={whole.name}/${{file#./}}
        storage --request POST --upload-file "$file" --output /dev/null \\
          "$uploads?uploadType=media&name=${{name//\\//%2F}}" || exit 1
      done && mv "$folder"/copying "$folder"/copied
  ) 9>"$folder"/copies
}}
restore() {{
  local each
  for each in metrics tapes; do
    mkdir -p "$folder"/workdir/$each
    mine={whole.name}%2F$each%2F{role.name}.jsonl
    storage "$objects?fields=items/name&prefix=$mine" >"$folder"/listed ||
      return
    sed -n 's/.*"name": *"\\([^"]*\\)".*/\\1/p' "$folder"/listed |
      while read -r name; do
        file=$folder/workdir/$each/${{name##*/}}
        [[ -e $file ]] && continue
        storage --output "$file" \\
          "$objects/${{name//\\//%2F}}?alt=media" || exit 1
        # It is not copied back: another host may have more.
        touch --date=@0 "$file"
      done || return
  done
}}
{restored if role.kind == LEARNER else ''}\
while sleep {COPIED_EVERY_S}; do copy; done &
trap "kill $!" EXIT
"""


def _evaluator(whole: JobSpec, role: Task) -> str:
  """Returns shell code that starts the evaluator beside the syncer."""
  if role.kind != SYNCER or whole.evaluator is None:
    return ''
  started = _docker(
    whole,
    whole.evaluator,
    ['--detach', '--name=evaluator', '--restart=on-failure'],
    Addresses('$host'),
  )
  return f'docker rm --force evaluator >/dev/null 2>&1\n{started}\n'


def _container(whole: JobSpec, role: Task, syncer: str) -> str:
  """Returns the `docker run` command of the role."""
  options = ['--rm', '--name=diloco']
  options.append(f'--stop-timeout={whole.grace_s}')
  if role.kind == LEARNER:
    options.append('--privileged')  # The chips are devices of the machine.
  known = Addresses('$host', syncer, '$index', '$coordinator')
  return _docker(whole, role, options, known)


def _docker(
  whole: JobSpec, role: Task, options: Sequence[str], known: Addresses
) -> str:
  environment = [f'--env={key}={value}' for key, value in whole.environment]
  fixed = shlex.join(
    ['docker', 'run', '--network=host', *options, *environment]
  )
  folders = ' '.join(
    f'"--volume=$folder/{name}":{shlex.quote(place)}'
    for name, place in (
      ('config', f'{CONFIG_FOLDER}:ro'),
      ('secret', f'{SECRET_FOLDER}:ro'),
      ('workdir', whole.workdir),
    )
  )
  program = [f'--entrypoint={whole.python}', whole.image]
  command = shell_command(program, whole, role, known)
  return f'{fixed} {folders} {command}'
