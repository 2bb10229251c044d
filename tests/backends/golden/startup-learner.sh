#!/bin/bash
# first-learner-1, attempt 2: written by launch.main.
folder=${DILOCO_FOLDER:-/var/lib/diloco}
mkdir -p "$folder"/config "$folder"/secret "$folder"/workdir
chmod 700 "$folder"/secret
export DOCKER_CONFIG=$folder/docker  # A home folder may be read-only.
if [[ -e $folder/over ]]; then
  echo 'first-learner-1: is over'
  exit 0
fi

metadata() {
  curl --silent --show-error --fail --retry 5 -H 'Metadata-Flavor: Google' \
    "$@"
}
access_token() {
  metadata http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token |
    sed 's/.*"access_token":"\([^"]*\)".*/\1/'
}
secret() { # $1: its name; $2: the file.
  until curl --silent --show-error --fail \
    -H "Authorization: Bearer $(access_token)" \
    "https://secretmanager.googleapis.com/v1/projects/p/secrets/$1/versions/latest:access" |
    sed -n 's/.*"data": *"\([^"]*\)".*/\1/p' | base64 -d >"$2" &&
    [[ -s $2 ]]; do
    echo "first-learner-1: secret $1 can not be read, again in 10 s"
    sleep 10
  done
  chmod 600 "$2"
}
# $1: why. Nothing is started again after it.
over() {
  metadata -X PUT --data "$1" \
    http://metadata.google.internal/computeMetadata/v1/instance/guest-attributes/diloco/exit
  echo "$1" >"$folder"/over
  echo "first-learner-1: over, exit code $1"
  exit 0
}

printf %s 'text of the configuration
' \
  >"$folder"/config/quickstart.py
secret first-learner-1-tls-crt "$folder"/secret/tls.crt
secret first-learner-1-token "$folder"/secret/token
access_token | docker login --username oauth2accesstoken --password-stdin https://us-docker.pkg.dev
host=$(metadata http://metadata.google.internal/computeMetadata/v1/instance/network-interfaces/0/ip)
for ((restarts = 0; ; restarts++)); do
  docker rm --force diloco >/dev/null 2>&1
  docker run --network=host --rm --name=diloco --stop-timeout=30 --privileged --env=PYTHONUNBUFFERED=1 --env=MALLOC_MMAP_THRESHOLD_=1073741824 --env=MALLOC_TRIM_THRESHOLD_=1073741824 --env=MALLOC_TOP_PAD_=67108864 --env=NPROC=2 "--volume=$folder/config":/etc/diloco/config:ro "--volume=$folder/secret":/etc/diloco/secret:ro "--volume=$folder/workdir":/workdir --entrypoint=python us-docker.pkg.dev/p/r/diloco:1 -m diloco.learner --config=experiments/quickstart.py --workdir=/workdir --token_file=/etc/diloco/secret/token --learner=1 --notice_s=25 "--config.transport.host=$host" "--syncer=10.0.0.1:7777"
  code=$?
  case $code in
    0|64|69|78) over "$code" ;;
  esac
  if (( restarts >= 20 )); then
    over "$code"
  fi
  echo "first-learner-1: exit code $code, again in 10 s"
  sleep 10
done
