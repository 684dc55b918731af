#!/usr/bin/env bash
# A whole run on this machine: a rendezvous, and one torchrun per replica, so that a replica that dies takes nobody along.
#
#   launch/local.sh CONFIG [--set KEY=VALUE ...]
#
# Ctrl-C (or SIGTERM to this script) stops the run at an agreed step with its weights saved; a second one ends it now.
set -euo pipefail
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
  echo "usage: launch/local.sh CONFIG [--set KEY=VALUE ...]" >&2
  exit 2
fi
config=$1
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -n "${PYTHON:-}" ]; then
  python=$PYTHON
elif [ -x "$here/.venv/bin/python" ]; then
  python=$here/.venv/bin/python
else
  python=python3
fi

sizes=$("$python" -m noloco_mega sizes --config "$config" "$@")
read -r replicas ranks <<<"$sizes"
work=$(mktemp -d)
trap 'kill "${rendezvous:-}" 2>/dev/null; rm -rf "$work"' EXIT

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -z "${NOLOCO_SECRET:-}${NOLOCO_SECRET_FILE:-}" ]; then
  # A secret of this run alone, unless the user has one.
  (umask 077 && "$python" -c 'import secrets; print(secrets.token_hex(32))' >"$work/secret")
  export NOLOCO_SECRET_FILE=$work/secret
fi

setsid "$python" -m noloco_mega rendezvous --address-file "$work/address" --parent $$ &
rendezvous=$!
while [ ! -s "$work/address" ]; do
  kill -0 "$rendezvous" 2>/dev/null || { wait "$rendezvous"; exit 1; }
  sleep 0.1
done
NOLOCO_RENDEZVOUS=$(cat "$work/address")
export NOLOCO_RENDEZVOUS

launches=()
for ((replica = 0; replica < replicas; replica++)); do
  # A session of its own: a Ctrl-C must reach the ranks through `stop` below, not torchrun, which would take it for a
  # failure.
  NOLOCO_REPLICA=$replica setsid "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    --module noloco_mega.train --config "$config" "$@" &
  launches+=($!)
done

asked=0
stop() {
  asked=$((asked + 1))
  local launch
  for launch in "${launches[@]}"; do
    if [ "$asked" -eq 1 ]; then
      # One rank of each replica is enough: they agree on a step.
      local rank=
      read -r rank _ 2>/dev/null <"/proc/$launch/task/$launch/children" || true
      # No rank yet: end the launch itself.
      kill -TERM "${rank:-$launch}" 2>/dev/null || true
    else
      kill -TERM "$launch" 2>/dev/null || true
    fi
  done
}
trap stop INT TERM HUP

failed=0
for launch in "${launches[@]}"; do
  # `wait` returns early when a signal comes in; the launch is then still there.
  while kill -0 "$launch" 2>/dev/null; do wait "$launch" || true; done
  wait "$launch" || failed=$((failed + 1))
done
if [ "$failed" -gt 0 ]; then
  echo "launch/local.sh: $failed of $replicas replicas ended with an error" >&2
  exit 1
fi
