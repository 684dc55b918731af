#!/usr/bin/env bash
# One replica by torchrun: run it once on every node of the replica, on all replicas' nodes.
#
#   NOLOCO_REPLICA=R NOLOCO_RENDEZVOUS=HOST:PORT launch/torchrun.sh CONFIG [TORCHRUN OPTIONS] [-- --set KEY=VALUE ...]
#   launch/torchrun.sh CONFIG --together [TORCHRUN OPTIONS] [-- --set KEY=VALUE ...]
#
# A replica on one node needs no options; one on N nodes takes torchrun's own on each of them:
#   --nnodes N --node-rank K --master-addr FIRST_NODE --master-port PORT
# Start the rendezvous anywhere that all nodes reach: python -m noloco_mega rendezvous --host HOST --port PORT
#
# --together starts the whole run as one launch, without a rendezvous of its own. torchrun ends all its processes when one
# fails, so the replicas then fail together.
set -euo pipefail
script=launch/torchrun.sh
source "$(dirname "$0")/common.sh"
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then usage; fi
config=$1
shift

together= nodes=1 options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --together) together=1 ;;
    --nnodes) nodes=$2; options+=("$1" "$2"); shift ;;
    --nnodes=*) nodes=${1#*=}; options+=("$1") ;;
    *) options+=("$1") ;;
  esac
  shift
done
[ $# -eq 0 ] || shift

prepare "$config" "$@"
if [ -n "$together" ]; then
  [ -z "${NOLOCO_REPLICA:-}" ] || fail "NOLOCO_REPLICA says that this launch is one replica, --together that it is all"
  ranks=$((replicas * ranks))
else
  [ -n "${NOLOCO_REPLICA:-}" ] || fail "set NOLOCO_REPLICA to this replica's number (0 to $((replicas - 1))), or say --together"
  [ -n "${NOLOCO_RENDEZVOUS:-}" ] || fail "set NOLOCO_RENDEZVOUS=HOST:PORT of a running rendezvous:" \
    "$python -m noloco_mega rendezvous --host HOST --port PORT"
fi
[ $((ranks % nodes)) -eq 0 ] || fail "$ranks ranks cannot be spread evenly over $nodes nodes"
[ "$nodes" != 1 ] || options+=(--standalone)
start "$python" -m torch.distributed.run --nproc-per-node $((ranks / nodes)) "${options[@]}" \
  --module "$program" --config "$config" "$@"
finish
