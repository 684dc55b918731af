#!/usr/bin/env bash
# A whole run on this machine: a rendezvous, and one torchrun per replica, so that a replica that dies takes nobody along.
#
#   launch/local.sh CONFIG [--set KEY=VALUE ...]
#
# Ctrl-C (or SIGTERM to this script) stops the run at an agreed step with its weights saved; a second one ends it now.
# Where there are GPUs, each replica takes the next ones.
set -euo pipefail
script=launch/local.sh
source "$(dirname "$0")/common.sh"
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then usage; fi
config=$1
shift

prepare "$config" "$@"
serve_rendezvous 127.0.0.1
for ((replica = 0; replica < replicas; replica++)); do
  gpus=$(gpus_of "$replica")
  start env NOLOCO_REPLICA="$replica" ${gpus:+"$gpus"} \
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    --module "$program" --config "$config" "$@"
done
finish
