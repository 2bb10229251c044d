# SPDX-License-Identifier: Apache-2.0
# What a virtual machine does at each of its starts: one role. The variables and
# functions that it needs stand above it; see `queued_resources.startup_script`.
#
# It reads secrets, starts the role's container, and starts it again unless it
# ended with success or a fatal exit code. That code it leaves as a guest
# attribute, and in a file: a machine that starts again then does nothing.
#
# The hosts of a slice run this side by side and don't speak with each other.
# When a learner dies on one, JAX ends it on all others within 20 s, and each
# waits for longer than that before it starts again ($again_s). So none meets a
# process of the last attempt, all start within 20 s of each other, and the
# first to start wait for the last at the coordinator. Should one start earlier
# all the same, after a reboot, then that attempt dies too, everywhere, and the
# next begins as told.
instance=http://metadata.google.internal/computeMetadata/v1/instance
secrets_api=https://secretmanager.googleapis.com/v1/projects/$project/secrets
folder=${DILOCO_FOLDER:-/var/lib/diloco}
mkdir -p "$folder"/config "$folder"/secret "$folder"/workdir
chmod 700 "$folder"/secret
export DOCKER_CONFIG=$folder/docker  # A home folder may be read-only.
if [[ -e $folder/over ]]; then
  echo "$name: is over"
  exit 0
fi

request() {
  curl --silent --show-error --fail "$@"
}
metadata() { # What follows $instance, behind options of curl.
  request --retry 5 -H 'Metadata-Flavor: Google' "${@:2}" "$instance/$1"
}
access_token() {
  metadata service-accounts/default/token |
    sed 's/.*"access_token":"\([^"]*\)".*/\1/'
}
authorized() {
  request -H "Authorization: Bearer $(access_token)" "$@"
}
attribute() { # $1: its name. One that is empty is not there yet.
  local value
  until value=$(metadata attributes/$1) && [[ -n $value ]]; do
    sleep $retry_s
  done
  echo "$value"
}
over() { # $1: why. Nothing is started again after it.
  metadata guest-attributes/$exit_attribute -X PUT --data "$1"
  echo "$1" >"$folder"/over
  echo "$name: over, exit code $1"
  exit 0
}

printf %s "$config_text" >"$folder/config/$config_name"
for each in "${secrets[@]}"; do  # 'NAME FILE'
  file=$folder/secret/${each#* }
  until authorized "$secrets_api/${each%% *}/versions/latest:access" |
    sed -n 's/.*"data": *"\([^"]*\)".*/\1/p' | base64 -d >"$file" &&
    [[ -s $file ]]; do
    echo "$name: secret ${each%% *} can not be read, again in $retry_s s"
    sleep $retry_s
  done
  chmod 600 "$file"
done
if [[ -n $registry ]]; then
  access_token | docker login --username oauth2accesstoken --password-stdin \
    "https://$registry"
fi
host=$(metadata network-interfaces/0/ip)
if (( hosts > 1 )); then
  index=$(attribute agent-worker-number)
  # 'ID:PORT:ADDRESS' of each host, by their numbers.
  first=$(attribute worker-network-endpoints | cut -d, -f1 | cut -d: -f3)
  coordinator=$first:$coordinator_port
fi
# The system of a CPU machine lets only ssh in, whatever the network allows.
if [[ $kind != learner ]]; then
  iptables --wait --insert INPUT --protocol tcp --jump ACCEPT
fi
docker rm --force evaluator >/dev/null 2>&1
run_evaluator

# Files go to the bucket as they grow. A learner's new slice has an empty disk:
# its files come from the bucket first, which would keep those of its last life
# alone.
uploads=https://storage.googleapis.com/upload/storage/v1/b/$bucket/o
objects=https://storage.googleapis.com/storage/v1/b/$bucket/o
# Whole files that have changed since the last time.
copy() {
  [[ -n $bucket ]] || return
  (
    flock 9
    # A clock's tick may hold two changes: the last ones are copied twice.
    touch --date='2 seconds ago' "$folder"/copying
    [[ -e $folder/copied ]] || touch --date=@0 "$folder"/copied
    cd "$folder"/workdir || exit
    find . -type f -newer "$folder"/copied "${left_out[@]}" |
      while read -r file; do
        object=$run/${file#./}
        authorized --request POST --upload-file "$file" --output /dev/null \
          "$uploads?uploadType=media&name=${object//\//%2F}" || exit 1
      done && mv "$folder"/copying "$folder"/copied
  ) 9>"$folder"/copies
}
restore() {
  local each
  for each in metrics tapes; do
    mkdir -p "$folder"/workdir/$each
    mine=$run%2F$each%2F$role.jsonl
    authorized "$objects?fields=items/name&prefix=$mine" >"$folder"/listed ||
      return
    sed -n 's/.*"name": *"\([^"]*\)".*/\1/p' "$folder"/listed |
      while read -r object; do
        file=$folder/workdir/$each/${object##*/}
        [[ -e $file ]] && continue
        authorized --output "$file" "$objects/${object//\//%2F}?alt=media" ||
          exit 1
        # It is not copied back: another host may have more.
        touch --date=@0 "$file"
      done || return
  done
}
if [[ -n $bucket ]]; then
  if [[ $kind == learner ]]; then
    until restore; do sleep $retry_s; done
  fi
  while sleep $copied_every_s; do copy; done &
  trap "kill $!" EXIT
fi

for ((restarts = 0; ; restarts++)); do
  docker rm --force diloco >/dev/null 2>&1
  run_role
  code=$?
  copy
  if [[ " 0 $fatal " == *" $code "* ]] || (( restarts >= restarts_max )); then
    over "$code"
  fi
  echo "$name: exit code $code, again in $again_s s"
  sleep $again_s
done
