#!/usr/bin/env bash
# Trains on a Cloud TPU pod: requests it, installs this checkout on its workers, starts `ragrl` on all
# of them, shows the log of the first, and deletes the pod at the end. A pod that was preempted is
# replaced, and the run resumes from its newest checkpoint.
#
#   NAME=c3po ZONE=us-west4-a ACCELERATOR=v5litepod-16 FLAGS=--spot SETUP='sudo mount ... /mnt/runs' \
#       launch/tpu.sh train --config=configs/c3po.py --workdir=/mnt/runs/c3po
#   NAME=c3po ZONE=us-west4-a launch/tpu.sh delete
#
# After Ctrl-C the pod trains on, and the same command watches it again; another command is refused
# while the first one runs. Further variables:
#
#   RUNTIME   software of the workers; by default the one for the accelerator
#   FLAGS     more flags of `gcloud compute tpus queued-resources create`
#   SETUP     run on each worker before each start: mounts the disk of --workdir, which all share
#   RESTARTS  how often a run that crashed is started again (3)
#   POLL      seconds between two looks at the pod (30)
#   HF_TOKEN  of gated models: the workers keep it where huggingface_hub looks for it
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'tpu.sh: %s\n' "$*" >&2; }
fail() {
  say "error: $1"
  shift
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}

for name in NAME ZONE; do
  [[ -n "${!name:-}" ]] || fail "$name is not set" "see the first lines of $0"
done
(($#)) || fail 'no command of ragrl' "see the first lines of $0"
command -v gcloud >/dev/null || fail 'gcloud is not in PATH' 'install the Google Cloud CLI, and log in'

printf -v deletion 'NAME=%q ZONE=%q %q delete' "$NAME" "$ZONE" "$0"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# shellcheck disable=SC2153 # NAME is a variable of the environment
tpu() { gcloud compute tpus "$1" "$2" "$NAME" --zone="$ZONE" --quiet "${@:3}"; }
on() { tpu tpu-vm ssh --worker="$1" --command="$2"; }

# The state of the request: NONE without one, and UNKNOWN if gcloud fails.
state() {
  if tpu queued-resources describe --format='value(state.state)' 2>"$scratch/errors"; then
    return
  elif grep -q NOT_FOUND "$scratch/errors"; then
    echo NONE
  else
    cat "$scratch/errors" >&2
    echo UNKNOWN
  fi
}

request() {
  local runtime=tpu-ubuntu2204-base flags
  case "${ACCELERATOR:?set it to the type of the pod, such as v5litepod-16}" in
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v6e-*) runtime=v2-alpha-tpuv6e ;;
  esac
  read -rd '' -a flags <<<"${FLAGS:-}" || : # all of its lines
  tpu queued-resources create --node-id="$NAME" --accelerator-type="$ACCELERATOR" \
    --runtime-version="${RUNTIME:-$runtime}" ${flags[@]+"${flags[@]}"} ||
    fail "gcloud refused the request for $NAME" 'see its message above; nothing was created'
}

delete() {
  say "deleting $NAME"
  tpu queued-resources delete --force ||
    fail "$NAME was not deleted and costs money" "repeat: $deletion"
}

# Counts what fails without a run in between: a worker may just be rebooting.
troubles=0
trouble() {
  say "$1 ($((++troubles)) of 5)"
  ((troubles < 5)) ||
    fail "gave up on $NAME, which still exists and costs money" \
      'see the messages above; then give the same command again,' \
      "or delete it: $deletion"
}

# --- what the workers run: their run has the folder ~/ragrl-run ----------------------------------

printf -v words ' %q' "$@"
printf -v run '%q' "launch/ragrl.sh --device tpu$words; echo \$? >~/ragrl-run/code"
printf -v words '%q' "ragrl$words"
# shellcheck disable=SC2016 # the workers expand these
{
  # The image has Python 3.10; launch/install.sh finds a newer one of uv.
  install='set -e
mkdir -p ~/jax_ragrl
tar -xzf ~/ragrl.tgz -C ~/jax_ragrl
python3 -c "import sys; sys.exit(sys.version_info < (3, 11))" ||
  { python3 -m pip install --user uv; python3 -m uv python install 3.12; }
~/jax_ragrl/launch/install.sh tpu
[ ! -e ~/hf_token ] || { install -D -m 600 ~/hf_token ~/.cache/huggingface/token && rm ~/hf_token; }
'${SETUP:-}
  # All processes of the run inherit the lock. The number of a process would not do: after a worker
  # was started again, another one may have it.
  begin='mkdir -p ~/ragrl-run && cd ~/jax_ragrl && exec 9>~/ragrl-run/lock || exit
flock -n 9 || { kill -KILL -- "-$(cat ~/ragrl-run/pid)"; flock -w 60 9; } || exit
rm -f ~/ragrl-run/code
printf "%s\n" '$words' >~/ragrl-run/command
setsid nohup bash -c '$run' >~/ragrl-run/log 2>&1 </dev/null & echo $! >~/ragrl-run/pid'
  # Prints new, running, lost, the exit code or the other command that runs; then the log from a byte on.
  look='cd ~/ragrl-run 2>/dev/null || { echo new; exit; }
if [ "$(cat command)" != '$words' ]; then
  flock -n lock true && echo new || cat command
  exit
fi
if flock -n lock true; then cat code 2>/dev/null || echo lost; else echo running; fi
[ ! -e log ] || tail log -c +'
}

start() {
  say "installing on the workers of $NAME"
  byte=1
  if ! gcloud compute tpus tpu-vm scp "${sent[@]}" "$NAME:" --zone="$ZONE" --quiet --worker=all ||
    ! on all "$install"; then
    trouble 'the installation failed (several workers: ssh-add ~/.ssh/google_compute_engine)'
  elif ! on all "$begin"; then
    trouble 'the run did not start on all workers'
  else
    say 'started: ragrl' "$@"
  fi
}

byte=1 crashes=0
tend() {
  local status size
  if ! on 0 "$look$byte" >"$scratch/told"; then
    # A request can stay active for a while after its pod is gone.
    case "$(tpu tpu-vm describe --format='value(state)')" in
      PREEMPTED | TERMINATED) delete ;;
      *) trouble "worker 0 of $NAME does not answer" ;;
    esac
    return
  fi
  status=$(head -n 1 "$scratch/told")
  tail -n +2 "$scratch/told" | tee "$scratch/log"
  size=$(wc -c <"$scratch/log")
  byte=$((byte + size))
  case "$status" in
    running) troubles=0 ;;
    new) start "$@" ;;
    143) start "$@" ;; # asked to stop, by a notice of maintenance or preemption
    0) delete && say 'the run is finished' && exit ;;
    ragrl*) fail "$NAME runs another command: $status" \
      "give that one to watch it, or another NAME, or delete it: $deletion" ;;
    2) delete && fail 'ragrl ended with a user error' 'see its last line above' ;;
    *)
      say "the run crashed ($status)"
      ((crashes++ < ${RESTARTS:-3})) || { delete && fail "the run crashed $crashes times" 'see its log above'; }
      start "$@"
      ;;
  esac
}

if [[ "$*" == delete ]]; then
  delete
  exit
fi
trap 'say "$NAME trains on: the same command watches it again, and this deletes it: $deletion"; exit 130' INT
git ls-files -z --cached --others --exclude-standard | tar -czf "$scratch/ragrl.tgz" --null -T - ||
  fail 'could not pack this checkout' 'it has to be a clone of git; restore or commit deleted files'
sent=("$scratch/ragrl.tgz")
if [[ -n "${HF_TOKEN:-}" ]]; then
  # A file: command lines are seen by other users and kept in logs.
  (umask 077 && printf '%s' "$HF_TOKEN" >"$scratch/hf_token")
  sent+=("$scratch/hf_token")
fi
[[ -n "${SETUP:-}" ]] ||
  say "SETUP is not set: a --workdir that it does not mount is on the disk of $NAME, and deleted with it"
former=''
while :; do
  now=$(state)
  [[ "$now" == "$former" ]] || say "$NAME: $now"
  former=$now
  case "$now" in
    NONE) request ;;
    ACTIVE) tend "$@" ;;
    SUSPENDED) delete ;; # preempted; a request cannot become active twice
    FAILED)
      tpu queued-resources describe --format='value(state.failedData.error.message)' >&2 || :
      fail "the request for $NAME failed" "delete it: $deletion" \
        'then ask for another ACCELERATOR, ZONE or quota'
      ;;
    UNKNOWN) trouble "gcloud does not tell the state of $NAME" ;;
    *) ;; # waiting, being provisioned, suspended or deleted
  esac
  sleep "${POLL:-30}"
done
