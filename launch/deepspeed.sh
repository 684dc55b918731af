#!/usr/bin/env bash
# A run by the deepspeed launcher on the hosts of a hostfile ("HOST slots=GPUS" per line), one launch per replica.
#
#   launch/deepspeed.sh CONFIG HOSTFILE [DEEPSPEED OPTIONS] [-- --set KEY=VALUE ...]
#
#   --launcher pdsh | openmpi   how the hosts are reached, from here (default: pdsh)
#   --no_ssh --node_rank K      hosts are not reached from here: run this script on every host, K being the host's place
#                               in the hostfile; NOLOCO_RENDEZVOUS must then name a running rendezvous
#   --together                  one launch for the whole run: deepspeed ends all its processes when one fails, so the
#                               replicas then fail together
#
# Replicas take slots in the hostfile's order, each as many as it has ranks. Without NOLOCO_RENDEZVOUS one is served here, on
# NOLOCO_RENDEZVOUS_HOST, which all hosts must reach. The run's variables reach the hosts by deepspeed's own environment
# file, with what .deepspeed_env in this folder or your home says before them. The secret is a file, at the same path on
# every host. Ctrl-C stops what runs on this machine cleanly; remote ranks are best stopped there, one of any replica.
set -euo pipefail
script=launch/deepspeed.sh
source "$(dirname "$0")/common.sh"
if [ $# -lt 2 ] || [ "${1#-}" != "$1" ] || [ "${2#-}" != "$2" ]; then usage; fi
config=$1 hostfile=$2
shift 2

together= no_ssh= node= launcher=pdsh options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --together) together=1 ;;
    --no_ssh) no_ssh=1 ;;
    --node_rank) node=$2; shift ;;
    --node_rank=*) node=${1#*=} ;;
    --launcher) launcher=$2; shift ;;
    --launcher=*) launcher=${1#*=} ;;
    *) options+=("$1") ;;
  esac
  shift
done
[ $# -eq 0 ] || shift

prepare "$config" "$@"
shares=$("$python" -m noloco_mega hosts --config "$config" --hostfile "$hostfile" "$@")
mapfile -t shares <<<"$shares"
[ -z "$together" ] || shares=("$("$python" -m noloco_mega hosts --config "$config" --hostfile "$hostfile" --together "$@")")
mapfile -t hosts < <(sed 's/#.*//' "$hostfile" | awk 'NF {print $1}')

if [ -n "$no_ssh" ]; then
  [ -n "${NOLOCO_RENDEZVOUS:-}" ] || fail "with --no_ssh every host runs this script: start one rendezvous" \
    "($python -m noloco_mega rendezvous --host HOST --port PORT) and set NOLOCO_RENDEZVOUS=HOST:PORT on all of them"
  [ -n "$node" ] || fail "with --no_ssh give --node_rank K, this host's place in $hostfile (from 0)"
  [ "$node" -lt "${#hosts[@]}" ] || fail "--node_rank $node, but $hostfile has hosts 0 to $((${#hosts[@]} - 1))"
elif [ -z "${NOLOCO_RENDEZVOUS:-}" ]; then
  [ -n "${NOLOCO_RENDEZVOUS_HOST:-}" ] || fail "set NOLOCO_RENDEZVOUS_HOST to an address of this machine that all hosts" \
    "reach, to serve the rendezvous here, or NOLOCO_RENDEZVOUS=HOST:PORT of a running one"
  serve_rendezvous "$NOLOCO_RENDEZVOUS_HOST"
fi

# The environment of remote ranks; local ones inherit it. The user's own files come first.
environment() {
  cat "$HOME/.deepspeed_env" .deepspeed_env 2>/dev/null | grep = || true
  # An address of its own on every host, unless the user names an interface.
  [ -n "${NOLOCO_IFNAME:-}" ] || [ -n "$no_ssh" ] || echo "NOLOCO_HOST=auto"
  local name
  for name in NOLOCO_RENDEZVOUS NOLOCO_SECRET_FILE NOLOCO_IFNAME NOLOCO_TRACEBACK OMP_NUM_THREADS; do
    [ -z "${!name:-}" ] || echo "$name=${!name}"
  done
  [ -n "$together" ] || echo "NOLOCO_REPLICA=$1"
}

for index in "${!shares[@]}"; do
  share=${shares[$index]}
  IFS=@ read -ra entries <<<"$share"
  first=${entries[0]%%:*} numbers=${entries[0]#*:} here=
  words=(--master_addr "$first" --master_port $((29500 + index)))
  if [ -n "$no_ssh" ]; then
    for place in "${!entries[@]}"; do [ "${entries[$place]%%:*}" != "${hosts[$node]}" ] || here=$place; done
    [ -n "$here" ] || continue # this replica has no ranks on this host
    words+=(--hostfile "$hostfile" --include "$share" --no_ssh --node_rank "$here")
  elif [ "$launcher" = openmpi ]; then
    # This launcher takes whole hostfiles only, and leaves the choice of GPUs to us.
    for entry in "${entries[@]}"; do
      [ "${entry#*:}" = "$numbers" ] || fail "with the openmpi launcher a replica must have the same slots on each of" \
        "its hosts; replica $index has $share"
      echo "${entry%%:*} slots=$(tr , '\n' <<<"${entry#*:}" | wc -l)"
    done >"$work/hosts_$index"
    words+=(--hostfile "$work/hosts_$index" --launcher openmpi --force_multi)
  else
    words+=(--hostfile "$hostfile" --include "$share" --launcher "$launcher" --force_multi)
  fi
  environment "$index" >"$work/environment_$index"
  [ "$launcher" != openmpi ] || [ -n "$no_ssh" ] || echo "CUDA_VISIBLE_DEVICES=$numbers" >>"$work/environment_$index"
  replica=(NOLOCO_REPLICA="$index")
  [ -z "$together" ] || replica=(-u NOLOCO_REPLICA)
  start env "${replica[@]}" DS_ENV_FILE="$work/environment_$index" \
    "$python" -m deepspeed.launcher.runner "${words[@]}" "${options[@]}" \
    --module "$program" --config "$config" "$@"
done
[ "${#launches[@]}" -gt 0 ] || fail "no replica has ranks on host ${hosts[$node]}"
finish
