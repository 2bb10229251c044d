# SPDX-License-Identifier: Apache-2.0
# What a job of Slurm does: one role. The variables and functions that it needs
# stand above it; see `slurm.Slurm`.

# Ends the job, or puts it back into the queue; $1: the exit code.
leave() {
  if [[ -n $removed ]]; then
    echo "$name: removed, no restart"
    exit 0
  fi
  if [[ " $fatal " == *" $1 "* ]]; then
    echo "$name: exit code $1 would come again, no restart"
    exit "$1"
  fi
  (( $1 )) || exit 0
  if (( ${SLURM_RESTART_COUNT:-0} >= restarts_max )); then
    echo "$name: exit code $1, restarts used up"
    exit "$1"
  fi
  echo "$name: exit code $1, back into the queue"
  scontrol requeue "$SLURM_JOB_ID" || exit "$1"
  exit 0
}

# The end of the job's time, a preemption, or a removal (USR1): the process is
# told, and leaves within its notice.
told= removed= child=
tell() {
  told=1
  [[ -z $child ]] || kill -TERM "$child"
}
trap tell TERM
trap 'removed=1; tell' USR1

# The first address that is not of loopback, unless the user knows better.
own_host() {
  host=${DILOCO_HOST:-$(hostname -I)}
  host=${host%% *}
}
address=$logs/syncer.address
if [[ $kind == syncer ]]; then
  own_host
  echo "$host:$port" >"$address.part"
  mv "$address.part" "$address"
  if [[ -n $evaluator_log ]]; then
    until run_evaluator; do sleep 10; done >>"$evaluator_log" 2>&1 &
  fi
else
  until [[ -s $address ]]; do
    [[ -z $told ]] || leave "$stopped"
    sleep 5
  done
  syncer=$(cat "$address")
fi
if (( hosts > 1 )); then
  # The nodes of a learner meet at the first of them, at a port as JAX itself
  # takes it under Slurm: two learners on one node are two jobs.
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  coordinator=$first:$((61440 + SLURM_JOB_ID % 4096))
  # The file's name is new: a node that has once missed a file on a shared disk
  # may go on missing it for a while.
  refusal=$logs/refusal.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
fi

# Each node of a learner has an address of its own, so this runs there. srun
# reports the highest exit code only: a refusal on one node would be lost among
# the deaths that it causes on the others. A node that has left in good order
# stays a while, lest srun end the others.
on_node() {
  own_host
  (( hosts > 1 )) || run_role exec
  trap : TERM  # srun tells the program too, and this goes on behind it.
  run_role
  code=$?
  if [[ " $fatal " == *" $code "* ]]; then
    echo "$code" >"$refusal"
  elif [[ $code == "$stopped" ]]; then
    sleep "$leave_s"
  fi
  exit "$code"
}
export syncer coordinator refusal hosts fatal stopped leave_s
srun --kill-on-bad-exit=1 bash -c \
  "$(declare -f own_host run_role on_node); on_node" &
child=$!
[[ -z $told ]] || kill -TERM "$child"
while :; do
  told=
  wait "$child"
  code=$?
  [[ -n $told ]] || break  # Else it was the signal that ended the wait.
done
[[ ! -s $refusal ]] || code=$(cat "$refusal")
leave "$code"
