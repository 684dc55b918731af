# What the launch scripts share: sourced by them, not run. They set `script` to their own name for messages.
#
#   prepare CONFIG OVERRIDES...  -> replicas, ranks (per replica), python, work (a folder that is removed at the end) and
#                                program: training, or with NOLOCO_CHECK=1 the check of the very same launch
#   serve_rendezvous HOST        exports NOLOCO_RENDEZVOUS, unless the user has one
#   start COMMAND...             starts a launch in the background, in a session of its own
#   finish                       waits for all launches; Ctrl-C or SIGTERM then stops the run cleanly

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
}

fail() {
  echo "$script: $*" >&2
  exit 2
}

prepare() {
  local sizes here
  here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
  elif [ -x "$here/.venv/bin/python" ]; then
    python=$here/.venv/bin/python
  else
    python=python3
  fi
  sizes=$("$python" -m noloco_mega sizes --config "$@")
  read -r replicas ranks <<<"$sizes"
  program=noloco_mega.train
  [ -z "${NOLOCO_CHECK:-}" ] || program=noloco_mega.preflight
  work=$(mktemp -d)
  rendezvous=
  launches=()
  trap cleanup EXIT
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

cleanup() {
  [ -z "$rendezvous" ] || kill "$rendezvous" 2>/dev/null || true
  rm -rf "$work"
}

serve_rendezvous() {
  [ -z "${NOLOCO_RENDEZVOUS:-}" ] || return 0
  if [ -z "${NOLOCO_SECRET:-}${NOLOCO_SECRET_FILE:-}" ] && [ "$1" = 127.0.0.1 ]; then
    # A secret of this run alone, unless the user has one.
    (umask 077 && "$python" -c 'import secrets; print(secrets.token_hex(32))' >"$work/secret")
    export NOLOCO_SECRET_FILE=$work/secret
  fi
  setsid "$python" -m noloco_mega rendezvous --host "$1" --address-file "$work/address" --parent $$ &
  rendezvous=$!
  while [ ! -s "$work/address" ]; do
    kill -0 "$rendezvous" 2>/dev/null || { wait "$rendezvous"; exit 1; }
    sleep 0.1
  done
  NOLOCO_RENDEZVOUS=$(cat "$work/address")
  export NOLOCO_RENDEZVOUS
}

start() {
  # A session of its own: a Ctrl-C must reach the ranks through `stop` below, not the launcher, which would take it for a
  # failure.
  setsid "$@" &
  launches+=($!)
}

# The GPUs of replica $1 where all replicas share this machine: each takes the next ones. Nothing without GPUs.
gpus_of() {
  local all first=$(($1 * ranks))
  if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra all <<<"$CUDA_VISIBLE_DEVICES"
  elif command -v nvidia-smi >/dev/null; then
    mapfile -t all < <(nvidia-smi --query-gpu=index --format=csv,noheader)
  else
    return 0
  fi
  if [ "${#all[@]}" -lt $((replicas * ranks)) ]; then
    fail "this machine shows ${#all[@]} GPUs, but $replicas replicas of $ranks ranks need $((replicas * ranks));" \
      "make topology smaller, or set CUDA_VISIBLE_DEVICES to nothing and run.device to cpu"
  fi
  local mine=("${all[@]:$first:$ranks}")
  (IFS=, && echo "CUDA_VISIBLE_DEVICES=${mine[*]}")
}

# One rank of the launch whose process is $1: the first descendant that has no children. (A launcher may have helpers
# without children beside it: its youngest child is a rank, or leads to one.)
rank_of() {
  local parent=$1 child
  while child=$(awk '{print $NF}' "/proc/$parent/task/$parent/children" 2>/dev/null) && [ -n "$child" ]; do
    parent=$child
  done
  [ "$parent" = "$1" ] || echo "$parent"
}

stop() {
  asked=$((asked + 1))
  local launch rank
  for launch in "${launches[@]}"; do
    if [ "$asked" -eq 1 ]; then
      # One rank of each replica is enough: they agree on a step.
      rank=$(rank_of "$launch")
      # No rank yet: end the launch itself.
      kill -TERM "${rank:-$launch}" 2>/dev/null || true
    else
      kill -TERM "$launch" 2>/dev/null || true
    fi
  done
}

finish() {
  asked=0
  trap stop INT TERM HUP
  local failed=0 launch
  for launch in "${launches[@]}"; do
    # `wait` returns early when a signal comes in; the launch is then still there.
    while kill -0 "$launch" 2>/dev/null; do wait "$launch" || true; done
    wait "$launch" || failed=$((failed + 1))
  done
  if [ "$failed" -gt 0 ]; then
    echo "$script: $failed of ${#launches[@]} launches ended with an error" >&2
    exit 1
  fi
}
